"""Whether a measurement had the machine for itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.process_use import tree_processor_s

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Bystanders:
    """What other processes compute from now on: not this one, and not its children."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._computed_s = self._others_s()

    @property
    def cores(self) -> float:
        """Cores that they have kept busy, on average. Much above 0: no measurement."""
        seconds = time.monotonic() - self._began
        return round(max(0.0, (self._others_s() - self._computed_s) / seconds), 2)

    def _others_s(self) -> float:
        """Seconds that all have computed but we; children that ended count as others."""
        # user, nice, system, idle, iowait, irq, softirq, steal: the last is another machine's time.
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]
        return busy * _TICK_S - tree_processor_s(os.getpid())
