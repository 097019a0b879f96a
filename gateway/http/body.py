"""Bodies of requests: bounded each, and all together, in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from gateway.http.caller import HttpCaller
from gateway.http.refusals import HttpRefusal
from outrider.serving.errors import Overloaded, TooLarge

BODY_S = 30.0
"""What a client gets to send a body."""
_BODIES = 16
"""How many of the largest may be held before they are understood; or as many bytes of others."""
_RETRY_AFTER_S = 1.0


class Bodies:
    """All that are being read or understood."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one."""
        self._max_bytes = max_bytes
        self._num_held = 0  # bytes

    @contextlib.asynccontextmanager
    async def read(self, caller: HttpCaller, receive: Receive) -> AsyncIterator[bytes]:
        """The whole body, which counts as held while the block runs.

        Raises TooLarge, Overloaded and HttpRefusal.
        """
        _check_headers(caller)
        self._check_size(int(caller.header("content-length") or 0))
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._fill(body, receive)
            except TimeoutError:
                raise HttpRefusal(
                    408, f"the request's body did not arrive within {BODY_S:g} s"
                ) from None
            yield bytes(body)
        finally:
            self._num_held -= len(body)

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError("the client left")
            part = message.get("body", b"")
            self._check_size(len(body) + len(part))
            if self._num_held and self._num_held + len(part) > _BODIES * self._max_bytes:
                raise Overloaded(
                    f"{self._num_held} bytes of requests are being read already", _RETRY_AFTER_S
                )
            body += part
            self._num_held += len(part)
            more = message.get("more_body", False)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise TooLarge(
                f"the request's body may have {self._max_bytes} bytes (max_message_bytes)"
            )


def _check_headers(caller: HttpCaller) -> None:
    kind = caller.header("content-type") or ""
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HttpRefusal(415, f"Content-Type: must be application/json, got {kind[:80]!r}")
    coding = caller.header("content-encoding") or "identity"
    if coding.strip().lower() != "identity":
        raise HttpRefusal(415, f"Content-Encoding: {coding[:80]!r} is not supported")
