"""A transport whose close comes to an end, and comes late where a client still sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.http.connection import Connection

LINGER_S = 2.0
"""What a client gets to read an answer that came before it had sent everything."""
CLOSING_S = 10.0
"""What a client gets to take the rest of what was written to it, once its connection is closing."""


class ClosingTransport(asyncio.Transport):
    """Of one connection.

    The kernel answers what comes for a closed socket with a reset, and that may take the answer
    away from the client before it has read it.
    """

    def __init__(self, inner: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._inner = inner
        self._connection = connection
        self._timers: list[asyncio.TimerHandle] = []
        self._closing = False

    def write(self, data: Any) -> None:
        self._inner.write(data)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        loop = self._connection.loop
        self._timers.append(loop.call_later(CLOSING_S, self._inner.abort))
        if not self._connection.half_read:
            self._inner.close()
            return
        self._connection.flow.resume_reading()
        if self._inner.can_write_eof():
            self._inner.write_eof()
        self._timers.append(loop.call_later(LINGER_S, self._inner.close))

    def lost(self) -> None:
        """There is nothing left to close."""
        self._closing = True
        for timer in self._timers:
            timer.cancel()

    def abort(self) -> None:
        self._closing = True
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        if self._inner.is_closing() or (self._connection.has_untaken and not self._closing):
            return
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)
