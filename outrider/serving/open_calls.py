"""The calls that are open now: a drain waits for them, and in the end says why they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_ENDING_S = 1.0
"""What calls get to tell their clients that they were ended."""


class OpenCalls:
    """Handlers of our own services; health watches and the like do not count."""

    def __init__(self) -> None:
        self.ending = False
        """A handler that is cancelled now is cancelled by us and not by its client."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Count the current task's call as open while the block runs."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._none_left.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none_left.set()

    async def drain(self, grace_s: float) -> int:
        """Wait for the calls to end by themselves; returns how many did not and were ended."""
        if await self._wait(grace_s):
            return 0
        self.ending = True
        left = list(self._tasks)
        for task in left:
            task.cancel()
        # One that is stuck in a write to a client that does not read hears nothing of this.
        await self._wait(_ENDING_S)
        return len(left)

    async def _wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        return not self._tasks
