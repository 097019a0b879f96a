"""Ends streams that their clients have stopped reading.

Such a client holds its handler in a `yield`, where neither errors nor cancellation reach it. So the
handler is closed from outside, and the status waits behind what was written already: the client
gets it if it ever reads on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from outrider.serving.errors import OutriderError, Unavailable

_Context = Any  # grpc.aio.ServicerContext: generic over both message types


class UnreadStreams:
    """Watches the writes of all streams of a servicer."""

    def __init__(self, stall_s: float) -> None:
        """A message that is not taken within `stall_s` seconds ends its stream."""
        self._stall_s = stall_s
        self._aborts: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def writing(
        self, context: _Context, on_stall: Callable[[OutriderError], None]
    ) -> Iterator[None]:
        """Put this around a handler's `yield`.

        `on_stall` is called with the error that the client gets, before the generator is closed.
        """
        handler = asyncio.current_task()
        assert handler is not None
        timer = asyncio.get_running_loop().call_later(
            self._stall_s, self._end, context, handler, on_stall
        )
        try:
            yield
        finally:
            timer.cancel()

    def _end(
        self,
        context: _Context,
        handler: asyncio.Task[object],
        on_stall: Callable[[OutriderError], None],
    ) -> None:
        error = Unavailable(f"the stream was not read for {self._stall_s:g} s")
        abort = asyncio.create_task(_abort(context, error))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        # Behind the abort's beginning: the call then has its status, and this only ends the write.
        asyncio.get_running_loop().call_soon(handler.cancel)
        on_stall(error)


async def _abort(context: _Context, error: OutriderError) -> None:
    # It always ends with an error of grpc's: aborted once the client has read, or the client left.
    with contextlib.suppress(grpc.aio.BaseError):
        await context.abort(error.code, str(error))
