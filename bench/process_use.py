"""What a process has used, as Linux tells it: processor time and memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes."""

    resident: int
    """With pages that it shares with others and pages of files."""
    proportional: int
    """The same, each shared page divided among those that share it."""
    private: int
    """What would be free if it ended."""
    peak: int
    """Most that was ever resident."""


def memory_of(pid: int) -> Memory:
    """Now. Raises OSError for a process that has ended."""
    rollup = _kibibytes(Path(f"/proc/{pid}/smaps_rollup"))
    peak = _kibibytes(Path(f"/proc/{pid}/status"))["VmHWM"]
    private = rollup["Private_Clean"] + rollup["Private_Dirty"]
    return Memory(rollup["Rss"], rollup["Pss"], private, peak)


def processor_s(pid: int) -> float:
    """Of all its threads, in the kernel too. Raises OSError for a process that has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Processes that it has started and that are there."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # one that ends meanwhile
            if entry.name.isdigit() and int(_stat(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
    return found


def tree_of(pid: int) -> list[int]:
    """It, and all that descend from it and are there."""
    found = [pid]
    for one in found:
        found += children_of(one)
    return found


def tree_processor_s(pid: int) -> float:
    """Of all processes in its tree; 0 for those that have ended."""
    seconds = 0.0
    for one in tree_of(pid):
        with contextlib.suppress(OSError):
            seconds += processor_s(one)
    return seconds


def _stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _kibibytes(path: Path) -> dict[str, int]:
    """Lines of `Name:  number kB`, in bytes."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {w[0].rstrip(":"): int(w[1]) * _KIB for w in words if len(w) == 3 and w[2] == "kB"}
