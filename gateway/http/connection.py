"""One connection of an HTTP client: uvicorn's HTTP/1.1, with an end to everything that could last.

On h11, with which uvicorn takes 2.3 µs for a chunk, and not on httptools, 0.4 µs: both are little
beside the hundreds that a token takes on its way. With httptools a client that leaves goes
unnoticed once it has pipelined another request, a head may have any size, and clients of HTTP/1.0
get chunks, which they do not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.http.closing_transport import ClosingTransport
from gateway.http_totals import HttpTotals

CONNECTION = "connection"
"""Under which a request's `scope["state"]` holds its connection."""
MAX_HEAD_BYTES = 16 * 1024
"""Of all that comes before a body."""
HEAD_S = 10.0
"""What the head of a request may take, from the connection's beginning or from its first byte."""
_LINGER_BYTES = 64 * 1024 * 1024
_TURN_BYTES = 1024
"""Of one connection, understood in one turn of the event loop: at worst a millisecond or two."""
_PIPELINED_BYTES = 64 * 1024
"""Of further requests, read while one runs: a client that leaves is noticed only by reading."""


class FrontState(ServerState):
    """What all connections share."""

    draining = False
    """Each closes behind the answer that it is about to give."""
    connections: set[Connection]  # type: ignore[assignment]

    def __init__(
        self, most_connections: int, refuse: Callable[[int, str], bytes], totals: HttpTotals
    ) -> None:
        """refuse: makes a whole answer of a status and a message."""
        super().__init__()
        self.totals = totals
        self.most_connections = most_connections
        self.refuse = refuse
        self.none_left = asyncio.Event()
        """Set when the last connection of several has gone."""


class Connection(H11Protocol):
    """Has one request at a time; those that are pipelined wait."""

    server_state: FrontState

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: FrontState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state | {CONNECTION: self}, _loop)
        self._server_state = server_state
        self._head_timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None
        self._lost = False
        self._refused = False
        self._num_discarded = 0
        self._untaken = bytearray()  # has come, and waits for its turn
        self.idle_since_s = self.loop.time()
        server_state.totals.accepted += 1

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def closing(self) -> bool:
        """It ends, as soon as the client has taken what was written."""
        return self.transport.is_closing()

    @property
    def half_read(self) -> bool:
        """The client has more to send of what is being answered."""
        return self._refused or (self.cycle is not None and self.cycle.more_body)

    @property
    def closes(self) -> bool:
        """The answer that is about to be given is the last one here."""
        return self._server_state.draining or self.half_read

    @property
    def has_untaken(self) -> bool:
        """More has come than could be understood in one turn."""
        return bool(self._untaken)

    @property
    def stuck(self) -> bool:
        """The client does not take what was written to it, for now."""
        return self.flow.write_paused

    @contextlib.contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """`on_lost` is called when the client leaves while the block runs, or has left before."""
        self._on_lost = on_lost
        if self._lost or self._refused:  # what came behind the head was no HTTP
            on_lost()
        try:
            yield
        finally:
            if self._on_lost is on_lost:
                self._on_lost = None

    def answered(self, status: int) -> None:
        """An answer begins."""
        self._server_state.totals.answered(status)

    async def taken(self) -> None:
        """Return when the client has taken all but a little of what was written."""
        await self.flow.drain()

    def abort(self) -> None:
        """End it now; what was not sent yet is lost."""
        self.transport.abort()

    def break_off(self) -> None:
        """End it in the middle of an answer, so that no client can take that for a whole one."""
        if self.busy:
            self.cycle.disconnected = True  # else uvicorn complains of an answer without an end
        self.transport.close()

    # What uvicorn and the event loop call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One above the limit takes the place of who has been idle for longest.

        Where all have a request, of who has been sending one for longest: those who never come to
        an end must not keep out everybody else.
        """
        super().connection_made(ClosingTransport(transport, self))
        self._start_head_timer()
        state = self._server_state
        state.totals.established += 1
        state.totals.open += 1
        if len(state.connections) <= state.most_connections:
            return
        others = state.connections - {self}
        waiting = [each for each in others if not each.busy or each.half_read]
        if waiting:
            min(waiting, key=lambda each: (each.busy, each.idle_since_s)).abort()
        elif len(state.connections) > 2 * state.most_connections:
            self.abort()
        else:
            most = state.most_connections
            self._refuse(503, f"the gateway holds {most} connections over HTTP at once")

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for something here is told."""
        self._lost = True
        self._server_state.totals.open -= 1
        self._stop_head_timer()
        assert isinstance(self.transport, ClosingTransport)
        self.transport.lost()
        self._untaken.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._tell_lost()
        if not self.connections:
            self._server_state.none_left.set()

    def data_received(self, data: bytes) -> None:
        """What comes when the last answer was given is thrown away.

        The rest is taken little by little, so that others get their turn: a body of a byte a chunk
        costs hundreds of times what its size says.
        """
        if self.transport.is_closing():
            self._num_discarded += len(data)
            if self._num_discarded > _LINGER_BYTES:
                self.abort()
            return
        waits = bool(self._untaken)
        self._untaken += data
        if not waits:
            self._take()

    def _take(self) -> None:
        if self.transport.is_closing():
            self._num_discarded += len(self._untaken)
            self._untaken.clear()
            self.transport.resume_reading()
        if not self._untaken:
            return
        piece = bytes(self._untaken[:_TURN_BYTES])
        del self._untaken[:_TURN_BYTES]
        super().data_received(piece)
        if (
            self.busy
            and not self.cycle.more_body
            and len(self.conn.trailing_data[0]) <= _PIPELINED_BYTES
        ):
            # uvicorn stops at a large body, and at what is pipelined.
            self.flow.resume_reading()
        if self._untaken:
            self.transport.pause_reading()
            self.loop.call_soon(self._take)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def handle_events(self) -> None:
        """A request's head must not take long, from its first byte on."""
        super().handle_events()
        if self.busy:
            self._stop_head_timer()
        elif self.conn.trailing_data[0]:
            self._start_head_timer()

    def on_response_complete(self) -> None:
        """The next request may come."""
        self.idle_since_s = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """In the middle of an answer nobody can be told."""
        if self.busy:
            if self.cycle.response_started:
                self.abort()
                return
            self.cycle.disconnected = True
            self._tell_lost()
        error = sys.exception()  # h11's
        self._refuse(getattr(error, "error_status_hint", 400), f"this is no HTTP: {error}")

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self.answered(status)
        self.transport.write(self._server_state.refuse(status, message))
        self.transport.close()

    def _tell_lost(self) -> None:
        if self._on_lost is not None:
            self._on_lost()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
