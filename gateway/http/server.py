"""The gateway's HTTP port: listens on the service's own event loop, drains, ends everything.

Of uvicorn only the protocol is used. Its server would look ten times a second whether it should
end, and waits without end for clients that do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from gateway.http.connection import MAX_HEAD_BYTES, Connection, FrontState
from gateway.http.handshakes import accepting_tls
from gateway.http.reply import refuse
from gateway.http_totals import HttpTotals
from outrider.serving.http_config import http_config
from outrider.serving.sockets import bind

MOST_CONNECTIONS = 768
"""Each holds a file descriptor, of which a process has 1024 where nobody has said otherwise."""
_IDLE_S = 75
"""Longer than common load balancers keep theirs, so that they are the ones to close."""
_SEND_BUFFER_BYTES = 128 * 1024
"""The kernel would give a client that does not read some megabytes; it counts this twice."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A client whose machine has gone without a word is given up after a minute, also while it waits
for an answer and nothing is written to it. Seconds, seconds and probes."""
_MOST_HANDSHAKES = 128
"""Of TLS, at once and beside the connections."""
_FLUSH_S = 0.2
"""Time for the last answers to leave, before connections are cut."""
_ENDING_S = 1.0


class HttpServer:
    """A port that is open."""

    def __init__(self, port: int, state: FrontState) -> None:
        self.port = port
        self._state = state

    @property
    def num_connections(self) -> int:
        """Those that are open, and those that are about to close."""
        return len(self._state.connections)

    def drain(self) -> None:
        """Close idle connections; others close behind their answer. New ones are still answered."""
        self._state.draining = True
        for connection in list(self._state.connections):
            connection.shutdown()

    async def end(self) -> None:
        """Cut all connections, but let answers that were given leave."""
        connections, none_left = self._state.connections, self._state.none_left
        none_left.clear()
        for connection in list(connections):
            if connection.closing:
                continue
            if connection.busy:
                connection.abort()
            else:
                connection.shutdown()
        if connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await none_left.wait()
        for connection in list(connections):
            connection.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING_S)


@contextlib.asynccontextmanager
async def serving_http(
    app: Any,
    host: str,
    port: int,
    *,
    totals: HttpTotals,
    tls: ssl.SSLContext | None = None,
    most_connections: int = MOST_CONNECTIONS,
) -> AsyncIterator[HttpServer]:
    """Answer with the ASGI application `app` while the block runs.

    totals: where it is counted. tls: None for none.
    Raises OSError for a port that is taken.
    """
    bound = _bind(host, port)
    config = http_config(
        app,
        Connection,
        timeout_keep_alive=_IDLE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    config.load()
    state = FrontState(most_connections, refuse, totals)
    loop = asyncio.get_running_loop()

    def make() -> Connection:
        return Connection(config, state, {}, loop)

    server = HttpServer(bound.getsockname()[1], state)
    try:
        async with _accepting(bound, make, tls, config.backlog):
            yield server
    finally:
        await server.end()


@contextlib.asynccontextmanager
async def _accepting(
    bound: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext | None, backlog: int
) -> AsyncIterator[None]:
    if tls is not None:
        async with accepting_tls(
            bound, make, tls, backlog=backlog, most_handshakes=_MOST_HANDSHAKES
        ):
            yield
        return
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(make, sock=bound, backlog=backlog)
    try:
        yield
    finally:
        listener.close()


def _bind(host: str, port: int) -> socket.socket:
    bound = bind(host, port, "HTTP", "http_port")
    # Connections inherit them.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    # Else an event waits up to 40 ms for the one before it; asyncio misses sockets like this one.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return bound
