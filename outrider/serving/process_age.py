"""How long this process has been there, what Python took to start and to import included."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED_AT_S = time.monotonic()
_START_FIELD = 19
"""Of what follows the name in /proc/self/stat: the start, in ticks after the machine's."""


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds, to a hundredth; where Linux does not say, since this module was imported."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[_START_FIELD])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_AT_S
