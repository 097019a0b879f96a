"""What goes back to a client: whole answers, streams of events, errors at any moment.

An error before the first byte has its own status. Behind it there is an event that says what went
wrong, no `[DONE]`, and an end of the connection that no client can take for the end of an answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus

from starlette.types import Send

from gateway.http.caller import HttpCaller
from gateway.http.refusals import HttpRefusal, answer_to
from outrider.params import InvalidParam
from outrider.serving.errors import OutriderError

_COMMON = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-store",
    "x-accel-buffering": "no",  # else nginx collects events before it passes them on
}


class Reply:
    """To one request."""

    def __init__(self, caller: HttpCaller, send: Send) -> None:
        self._caller = caller
        self._connection = caller.connection
        self._send = send
        self._streams = self._complete = False

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """An answer in one piece. Returns when the client has taken it."""
        with self._caller.writing(_nobody_asks):
            await self._start(status, {**headers, "content-length": str(len(body))})
            await self._end(body)

    async def events(self, payloads: Sequence[bytes]) -> None:
        """The next events of a stream, which begins with the first call."""
        if not self._streams:
            self._streams = True
            await self._start(200, _EVENTS)
        if payloads:
            await self._write(b"".join(map(_event, payloads)))

    async def end_events(self, payloads: Sequence[bytes]) -> None:
        """The last events, and the mark behind them. Returns when the client has taken them."""
        with self._caller.writing(_nobody_asks):
            await self._end(b"".join(map(_event, (*payloads, b"[DONE]"))))

    async def error(self, error: OutriderError | InvalidParam) -> None:
        """However far the answer is."""
        status, headers, body = answer_to(error)
        if self._caller.status is None:
            await self.whole(status, headers, body)
        elif self._complete or self._connection.stuck:
            self._connection.abort()
        else:
            if self._streams:
                await self._write(_event(body))
            self._connection.break_off()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._caller.status = status
        self._connection.answered(status)
        every = _every_header(self._caller.request_id, headers)
        if self._connection.closes:
            every["connection"] = "close"
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in every.items()],
            }
        )

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})
        self._complete = True
        await self._connection.taken()


def refuse(status: int, message: str) -> bytes:
    """A whole answer to what is no request. The connection must be closed behind it."""
    status, headers, body = answer_to(HttpRefusal(status, message))
    every = _every_header(uuid.uuid4().hex, headers)
    every |= {"content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode() + body


def _every_header(request_id: str, headers: Mapping[str, str]) -> dict[str, str]:
    about = {"date": formatdate(usegmt=True), "x-request-id": request_id}
    return {**about, **_COMMON, **headers}


def _event(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


def _nobody_asks(_: OutriderError) -> None:
    pass  # the request itself has ended
