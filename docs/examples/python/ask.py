"""Asks a gateway one question and prints the answer as it comes.

    python ask.py "What is speculative decoding?"

OUTRIDER_ADDRESS is the gateway (127.0.0.1:50051), OUTRIDER_API_KEY a key if it asks for one,
OUTRIDER_TLS_CA the file of its certificate authority if it speaks TLS, OUTRIDER_TLS_CERT and
OUTRIDER_TLS_KEY what to show it if it asks for a certificate.
"""

import asyncio
import os
import sys
from pathlib import Path

from outrider.client import Client, ClientTls, InvalidRequest, OutriderError


async def main(question: str) -> int:
    ca, cert, key = (
        Path(file) if (file := os.environ.get(f"OUTRIDER_TLS_{name}")) else None
        for name in ("CA", "CERT", "KEY")
    )
    client = Client(
        os.environ.get("OUTRIDER_ADDRESS", "127.0.0.1:50051"),
        api_key=os.environ.get("OUTRIDER_API_KEY"),
        tls=ClientTls(ca, cert, key) if ca else None,
    )
    async with client:
        messages = [{"role": "user", "content": question}]
        try:
            # Leaving this block early, by `break` or Ctrl-C, ends the request at the gateway.
            async with client.stream(messages=messages, temperature=0, max_tokens=64) as stream:
                async for piece in stream:
                    print(piece.text, end="", flush=True)
                    if end := piece.finish:
                        print(
                            f"\n[{end.reason}; seed {end.seed}; "
                            f"{end.accepted} of {end.drafted} drafts stood]"
                        )
        except InvalidRequest as error:
            print(f"\n{error.field} is wrong: {error.message}", file=sys.stderr)
            return 1
        except OutriderError as error:
            print(f"\nno answer: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "What is a draft model?")))
