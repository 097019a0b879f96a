"""Token buckets: how much a minute, and when there is some again.

Levels are whole numbers of shares, of which a unit has as many as a minute has nanoseconds: each
nanosecond then brings exactly `per_minute` shares, and nothing is ever rounded. What has to wait
`retry_after_s` is let in when that time is over, and not a nanosecond before. Knows nothing of
requests and keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_MINUTE_NS = 60 * 10**9  # shares of a unit, too

ClockNs = Callable[[], int]


class TokenBucket:
    """Holds at most what a minute brings, and is full at first.

    Paid afterwards: `spend` takes what was used, be there enough or not, so that a level can be far
    below zero. Who asks first is told when there will be enough.
    """

    def __init__(self, per_minute: int, clock_ns: ClockNs = time.monotonic_ns) -> None:
        """per_minute: at least 1. clock_ns: nanoseconds that never go back."""
        self._per_minute = per_minute
        self._clock_ns = clock_ns
        self._shares = per_minute * _MINUTE_NS
        self._at_ns = clock_ns()

    @property
    def per_minute(self) -> int:
        """What a minute brings, and the most that it holds."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, per_minute: int) -> None:
        """From now on; what is there stays, as far as it has room, and what is owed stays owed."""
        self._refill()
        self._per_minute = per_minute
        self._refill()

    def spend(self, num_units: int) -> None:
        """Take that many out, below zero too."""
        self._refill()
        self._shares -= num_units * _MINUTE_NS

    def retry_after_s(self, num_units: int = 0) -> float:
        """Seconds until that many are in it; 0 if they are now. At most `per_minute` ever are.

        0 units: until nothing is owed.
        """
        self._refill()
        missing = num_units * _MINUTE_NS - self._shares
        return max(0, -(-missing // self._per_minute)) / 1e9

    def _refill(self) -> None:
        now_ns = self._clock_ns()
        brought = (now_ns - self._at_ns) * self._per_minute
        self._shares = min(self._shares + brought, self._per_minute * _MINUTE_NS)
        self._at_ns = now_ns
