"""The calls that are open now: a drain waits for them, and in the end says why they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

SHUTTING_DOWN = "the service is shutting down"
"""Why a call was ended; the message of the CancelledError that its handler gets."""
_ENDING_S = 1.0
"""What calls get to tell their clients that they were ended."""


@dataclass(eq=False, slots=True)
class OpenCall:
    """One call of one of our own services; health watches and the like do not count."""

    task: asyncio.Task[object]
    writing: bool = False
    """A message is on its way to the client: the handler itself is not running."""


class OpenCalls:
    """All of them."""

    def __init__(self) -> None:
        self.ending = False
        """What is still open has to end now, with a status that says so."""
        self._calls: set[OpenCall] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def track(self) -> Iterator[OpenCall]:
        """The current task's call, open while the block runs."""
        task = asyncio.current_task()
        assert task is not None
        call = OpenCall(task)
        self._calls.add(call)
        self._none_left.clear()
        try:
            yield call
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._none_left.set()

    async def drain(self, grace_s: float) -> int:
        """Wait for the calls to end by themselves; returns how many did not and were ended."""
        if await self._wait(grace_s):
            return 0
        self.ending = True
        left = list(self._calls)
        for call in left:
            # One that is writing looks for itself when it has written. If its client does not read,
            # that is never, and only the end of the connection tells it.
            if not call.writing:
                call.task.cancel(SHUTTING_DOWN)
        await self._wait(_ENDING_S)
        return len(left)

    async def _wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        return not self._calls
