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
from concurrent.futures import Future
from typing import Any, TypeVar

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
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def run(self, call: Callable[[], _T]) -> _T:
        """The result of `call()`, or its exception. A cancelled caller does not stop the call.

        Raises DeviceStuck when it takes longer than `call_timeout_s`.
        """
        timeout_s = self.call_timeout_s
        if self._thread.ident is None:
            self._thread.start()
        future: Future[_T] = Future()
        self._calls.put((future, call))
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not timeout.expired():
                raise  # the call's own
            self._stuck = True
            raise DeviceStuck(f"the device has not answered for {timeout_s:g} s") from None

    def close(self) -> None:
        """Let the running call end and take no more."""
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._calls.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
        self._calls.put(None)
        if self._thread.ident is not None and not self._stuck:
            self._thread.join(_CLOSING_S)

    def _work(self) -> None:
        while (each := self._calls.get()) is not None:
            future, call = each
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del each, future, call  # what they hold would else live until the next call
