#!/usr/bin/env bash
# Asks a gateway by grpcurl, which learns the messages from the gateway itself (reflection), and
# prints each message of the answer as JSON when it comes.
#
#   ./ask.sh
#   ./ask.sh '{"text": "The quick brown fox", "stopping": {"max_tokens": 20}}'
#
# OUTRIDER_ADDRESS is the gateway (127.0.0.1:50051), OUTRIDER_API_KEY a key if it asks for one,
# OUTRIDER_TLS_CA the file of its certificate authority if it speaks TLS, OUTRIDER_TLS_CERT and
# OUTRIDER_TLS_KEY what to show it if it asks for a certificate.
set -euo pipefail

address=${OUTRIDER_ADDRESS:-127.0.0.1:50051}
options=(-max-time 60)
if [ -n "${OUTRIDER_TLS_CA:-}" ]; then
  options+=(-cacert "$OUTRIDER_TLS_CA")
  if [ -n "${OUTRIDER_TLS_CERT:-}" ]; then
    options+=(-cert "$OUTRIDER_TLS_CERT" -key "$OUTRIDER_TLS_KEY")
  fi
else
  options+=(-plaintext)
fi
if [ -n "${OUTRIDER_API_KEY:-}" ]; then
  # grpcurl puts the key in by itself, so that it does not show in the list of processes.
  # shellcheck disable=SC2016
  options+=(-expand-headers -H 'authorization: Bearer ${OUTRIDER_API_KEY}')
fi

question='{
  "chat": {"messages": [{"role": "user", "content": "What is a draft model?"}]},
  "sampling": {"temperature": 0},
  "stopping": {"max_tokens": 64}
}'
grpcurl "${options[@]}" "$address" outrider.v1.Inference/ListModels
grpcurl "${options[@]}" -d "${1:-$question}" "$address" outrider.v1.Inference/Generate
