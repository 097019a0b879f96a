"""Joules that this machine's processors have taken, from the counters that Linux shows (RAPL).

They count for the whole machine, whoever made it work. Most systems let only root read them: then
there is no figure, rather than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")

_COUNTED = ("package", "dram")
"""Beginnings of the names of what is summed. `core` and `uncore` are parts of a package."""


@dataclass(slots=True)
class _Zone:
    """One counter, which starts again at 0 behind `range_uj`."""

    file: Path
    range_uj: int
    last_uj: int


class EnergyMeter:
    """Joules since it was made; every reader gets the same growing figure.

    Counters start again after a quarter of an hour of hard work or longer: one that nobody reads in
    all that time loses what it counted.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._total_uj = 0
        self._zones = _find_zones(folder)

    def joules(self) -> float | None:
        """The figure of this moment; None where it cannot be known."""
        try:
            readings = [_read(zone.file) for zone in self._zones]
        except (OSError, ValueError):
            self._zones = []  # a sum of some of them would be no sum
        if not self._zones:
            return None
        for zone, now_uj in zip(self._zones, readings, strict=True):
            grown = now_uj - zone.last_uj
            self._total_uj += grown if grown >= 0 else grown + zone.range_uj
            zone.last_uj = now_uj
        return self._total_uj / 1e6


def _find_zones(folder: Path) -> list[_Zone]:
    """All that can be summed; none if any of them cannot be read."""
    zones = []
    try:
        for each in sorted(folder.glob("intel-rapl:*")):  # AMD's have this name too
            if (each / "name").read_text().strip().startswith(_COUNTED):
                file = each / "energy_uj"
                zones.append(_Zone(file, _read(each / "max_energy_range_uj"), _read(file)))
    except (OSError, ValueError):
        return []
    return zones


def _read(file: Path) -> int:
    return int(file.read_text())
