"""When a call is made again: before anything was delivered, a few times, within its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.client.errors import translated
from outrider.serving.errors import OutriderError, Overloaded, Unavailable
from outrider.serving.tls import ClientTls

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and how long to wait in between: exponential, with full jitter."""

    attempts: int = 4
    """Calls in all; 1: never again."""
    first_s: float = 0.2
    """The longest wait after the first failure; it doubles with each."""
    longest_s: float = 5.0
    """No wait is longer. A gateway that asks for a longer one is not asked again."""

    def wait_s(self, num_failed: int, error: OutriderError) -> float | None:
        """Seconds until the next try behind `num_failed` ones; None: there is none.

        Only what may be gone by itself is tried again: a gateway that is not there or not ready,
        and one that is too busy and says when to come back, which is the least time to wait.
        """
        if num_failed >= self.attempts or not isinstance(error, Unavailable | Overloaded):
            return None
        asked_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        if asked_s > self.longest_s:
            return None
        jitter_s = random.uniform(0, min(self.longest_s, self.first_s * 2 ** (num_failed - 1)))
        return min(self.longest_s, asked_s + jitter_s)


async def retrying(
    attempt: Callable[[float | None], Awaitable[_Result]],
    retries: Retries,
    timeout_s: float | None,
    tls: ClientTls | None,
) -> _Result:
    """The result of `attempt`, which gets the seconds that are left. Raises OutriderError.

    tls: what the attempts use.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    num_failed = 0
    while True:
        try:
            with translated(tls):
                return await attempt(None if deadline is None else max(0.0, deadline - loop.time()))
        except OutriderError as error:
            num_failed += 1
            wait_s = retries.wait_s(num_failed, error)
            if wait_s is None or (deadline is not None and loop.time() + wait_s >= deadline):
                raise
        await asyncio.sleep(wait_s)
