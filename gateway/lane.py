"""A thread for what takes long, one call after another, so that the event loop need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from outrider.serving.device import DeviceThread
from outrider.serving.errors import Overloaded

_T = TypeVar("_T")

_RETRY_AFTER_S = 1.0


class Lane:
    """A thread, and the line in front of it, which who is cancelled leaves."""

    def __init__(self, name: str, max_waiting_bytes: int | None = None) -> None:
        """max_waiting_bytes: None for as many as there are requests."""
        self._thread = DeviceThread(name)
        self._turn = asyncio.Lock()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def run(self, num_bytes: int, call: Callable[[], _T]) -> _T:
        """The result of `call()`, or its exception. Raises Overloaded when too much is waiting."""
        waiting, limit = self._waiting_bytes, self._max_waiting_bytes
        if waiting and limit is not None and waiting + num_bytes > limit:
            raise Overloaded(
                f"{waiting} bytes of long texts wait for their turn already", _RETRY_AFTER_S
            )
        self._waiting_bytes += num_bytes
        try:
            await self._turn.acquire()
        finally:
            self._waiting_bytes -= num_bytes
        running = asyncio.ensure_future(self._thread.run(call))
        # Who leaves does not stop the thread, and until that is free it is nobody's turn.
        running.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.close()
