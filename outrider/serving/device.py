"""One named thread on which everything that blocks on the device runs, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class DeviceThread:
    """Runs blocking calls one after another, so that the event loop never waits for the device."""

    def __init__(self, name: str = "device") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], _T]) -> _T:
        """The result of `call()`, or its exception. A cancelled caller does not stop the call."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Let the running call end and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
