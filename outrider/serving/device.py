"""One named thread on which everything that blocks on the device runs, in order.

A call that never returns can be given up by its caller, but not be ended: the thread is a daemon,
so that such a call does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_CLOSING_S = 2.0
"""How long `close` waits for the running call; a step takes less, loading a model may take more."""


class DeviceStuck(Exception):
    """A call has not returned in time. The thread is lost to it; nothing else will run there."""


class DeviceThread:
    """Runs blocking calls one after another, so that the event loop never waits for the device."""

    def __init__(self, name: str = "device") -> None:
        self.call_timeout_s: float | None = None
        """How long a call may take; None for as long as it likes."""
        self._stuck = False
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def run(self, call: Callable[[], _T]) -> _T:
        """The result of `call()`, or its exception. A cancelled caller does not stop the call.

        Raises DeviceStuck when it takes longer than `call_timeout_s`.
        """
        timeout_s = self.call_timeout_s
        if self._thread.ident is None:
            self._thread.start()
        handed = _Call(call, asyncio.get_running_loop())
        self._calls.put(handed)
        timer = None
        if timeout_s is not None:
            timer = handed.loop.call_later(timeout_s, self._give_up, handed, timeout_s)
        try:
            return await handed.future
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Let the running call end and take no more."""
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._calls.get_nowait()
                if waiting is not None:
                    waiting.future.cancel()
        self._calls.put(None)
        if self._thread.ident is not None and not self._stuck:
            self._thread.join(_CLOSING_S)

    def _give_up(self, handed: _Call[Any], timeout_s: float) -> None:
        if not handed.future.done():
            self._stuck = True
            reason = f"the device has not answered for {timeout_s:g} s"
            handed.future.set_exception(DeviceStuck(reason))

    def _work(self) -> None:
        while (each := self._calls.get()) is not None:
            each.run()
            del each  # what it holds would else live until the next call


class _Call(Generic[_T]):
    """One call on its way to the thread and back; the loop is woken once, by what came of it."""

    def __init__(self, call: Callable[[], _T], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[_T] = loop.create_future()
        self._call = call

    def run(self) -> None:
        """On the thread; nothing, if the caller has gone already."""
        if self.future.cancelled():
            return
        try:
            result = self._call()
        except BaseException as error:
            self._answer(self._fail, error)
        else:
            self._answer(self._succeed, result)

    def _answer(self, settle: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and everybody with it
            self.loop.call_soon_threadsafe(settle, outcome)

    def _succeed(self, result: _T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
