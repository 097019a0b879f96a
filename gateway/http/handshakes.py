"""Connections with TLS: accepted here, so that handshakes are bounded too.

The event loop's own server would hold any number of them, a file descriptor each, for clients that
connect and say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable

HANDSHAKE_S = 10.0
_NO_DESCRIPTOR_S = 0.1
"""A pause, when the process can open nothing more."""


@contextlib.asynccontextmanager
async def accepting_tls(
    bound: socket.socket,
    make: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext,
    *,
    backlog: int,
    most_handshakes: int,
) -> AsyncIterator[None]:
    """Give each connection on `bound` a protocol of `make` while the block runs, and close `bound`.

    The protocol's `connection_made` is called when the handshake is over. One handshake above the
    limit takes the place of the one that has lasted longest.
    """
    handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
    bound.setblocking(False)
    bound.listen(backlog)
    acceptor = asyncio.create_task(_accept(bound, make, tls, handshakes, most_handshakes))
    try:
        yield
    finally:
        tasks = [acceptor, *handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        bound.close()


async def _accept(
    bound: socket.socket,
    make: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext,
    handshakes: dict[asyncio.Task[None], None],
    most_handshakes: int,
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(bound)
        except OSError:
            await asyncio.sleep(_NO_DESCRIPTOR_S)
            continue
        if len(handshakes) >= most_handshakes:
            oldest = next(iter(handshakes))
            del handshakes[oldest]
            oldest.cancel()
        handshake = asyncio.create_task(_shake_hands(connection, make, tls))
        handshakes[handshake] = None
        handshake.add_done_callback(lambda task: handshakes.pop(task, None))


async def _shake_hands(
    connection: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext
) -> None:
    with contextlib.suppress(OSError):  # what TLS says of a client is no news
        await asyncio.get_running_loop().connect_accepted_socket(
            make, connection, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
        )
