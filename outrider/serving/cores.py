"""How many cores this process may use, which a container makes fewer than the machine has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may run on, or as many as its container's share is worth.

    More threads than that wait for each other at every step: several times slower, not faster.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
