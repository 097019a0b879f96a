"""Ratios of interleaved runs, with an interval that says how far to trust them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1, 2, 3 ... degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of the ratios of pairs, and its 95 % interval."""

    mean: float
    low: float
    high: float
    num_pairs: int

    def as_dict(self) -> dict[str, float]:
        """For a JSON line."""
        return {
            "mean": round(self.mean, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "pairs": self.num_pairs,
        }


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of pairs measured one after the other. Raises ValueError for fewer than two pairs."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError("an interval needs two pairs or more")
    mean = statistics.fmean(logs)
    quantile = _T95[min(len(logs) - 1, len(_T95)) - 1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))
