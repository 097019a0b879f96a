"""A TCP relay between two services, for tests: it delays, stalls, drops and resets.

Knows nothing of gRPC: to a stalled stream it looks as a network that has stopped.

    async with Relay(drafter.address) as relay:    # clients connect to relay.address
        relay.delay_s = 0.05
        relay.stall()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self

_CHUNK_BYTES = 64 * 1024
_MAX_DELAYED_CHUNKS = 1024


class Relay:
    """Passes bytes on in both directions until told otherwise. Settings apply at once."""

    def __init__(self, upstream: str, *, delay_s: float = 0.0) -> None:
        self.upstream = upstream
        self.delay_s = delay_s
        """Added to each direction; chunks keep their order and do not wait for each other."""
        self.connections = 0
        """Accepted since the start."""
        self._refusing = False
        self._dropping = False
        self._num_lost = 0  # connections that were there when bytes began to vanish
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """Bytes wait, connections stay."""
        self._flowing.clear()

    def resume(self) -> None:
        """Everything that waited goes on."""
        if self._dropping:
            self._num_lost = self.connections
        self._dropping = False
        self._refusing = False
        self._flowing.set()

    def drop(self) -> None:
        """Bytes vanish from now on. After `resume` only new connections pass them on."""
        self._dropping = True

    def reset(self, *, refuse: bool = False) -> None:
        """RST every connection; with `refuse` also new ones until `resume`."""
        self._refusing = refuse
        for writer in list(self._writers):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            if self._refusing:
                _reset(writer)
                return
            host, _, port = self.upstream.rpartition(":")
            try:
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                _reset(writer)
                return
            pair = {writer, up_writer}
            self._writers |= pair
            try:
                await asyncio.gather(
                    self._pump(number, reader, up_writer), self._pump(number, up_reader, writer)
                )
            finally:
                self._writers -= pair
                for each in pair:
                    each.close()
        except (OSError, asyncio.CancelledError):
            writer.close()
        finally:
            self._tasks.discard(task)

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One direction: a queue between reading and writing, so that delays do not add up."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_DELAYED_CHUNKS)

        async def read() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError:
                    data = b""  # passed on as an end
                await queue.put((loop.time() + self.delay_s, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due_s, data = await queue.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await self._flowing.wait()
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                if not self._dropping and number > self._num_lost:
                    writer.write(data)
                    await writer.drain()
        finally:
            reading.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
