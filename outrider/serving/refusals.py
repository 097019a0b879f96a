"""Why a connection did not come about, in words for operators, out of gRPC's long texts.

Only what TLS has to do with is put into other words. A server that refuses a client's certificate
hangs up without a word, so that one is told as what it may be.
"""

from __future__ import annotations

import re

from outrider.serving.tls import ClientTls

NOT_CONNECTED = "failed to connect to all addresses"
"""How gRPC's words begin where there is no connection."""
_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: (?P<why>[^:]+)")
_OTHER_TLS = re.compile(r"SSL routines:OPENSSL_internal:(?P<why>[A-Z0-9_]+)")
_WRONG_NAME = "Hostname Verification Check failed"
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe", "Endpoint closing", "EOF")
_UNKNOWN_CA = "unable to get local issuer certificate"


def explain_refusal(details: str, tls: ClientTls | None, server_name: str = "") -> str:
    """What TLS has to do with a failed connection; empty: nothing.

    details: of the gRPC error. tls: what the client used. server_name: who was expected.
    """
    if not details.startswith(NOT_CONNECTED):
        return ""
    if found := _UNVERIFIED.search(details):
        why = found["why"]
        hint = ", so it is not signed by tls_ca" if why == _UNKNOWN_CA else ""
        return f"certificate verify failed: {why}{hint}"
    if _WRONG_NAME in details:
        return (
            f"certificate verify failed: it is not for {server_name or 'the host that is dialled'}"
        )
    if found := _OTHER_TLS.search(details):
        why = found["why"]
        return "it speaks no TLS" if why in _NO_TLS else f"TLS failed: {why.lower()}"
    if any(each in details for each in _HUNG_UP):
        return _hung_up(tls)
    return ""


def _hung_up(tls: ClientTls | None) -> str:
    if tls is None:
        return "it hung up at once: perhaps it wants TLS, and tls_ca is not set"
    if tls.has_certificate:
        return "it hung up on the TLS handshake: perhaps it refuses our certificate, tls_cert"
    return (
        "it hung up on the TLS handshake: perhaps it wants a certificate, and tls_cert is not set"
    )
