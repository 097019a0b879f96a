"""Do counts fit exact probabilities? Pearson's test with small cells merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import torch

MIN_EXPECTED = 5.0
TOO_UNLIKELY = 1e-4
"""Below this p-value a fit is refused."""


def p_value(counts: Mapping[Hashable, int], probs: Mapping[Hashable, float]) -> float:
    """How likely counts are that fit no better, if `probs` is right. Outcomes that are impossible
    fail at once; `probs` must name every possible one."""
    total = sum(counts.values())
    assert abs(sum(probs.values()) - 1) < 1e-6
    strangers = [outcome for outcome in counts if probs.get(outcome, 0.0) <= 0.0]
    assert strangers == [], f"impossible: {strangers}"
    small_count, small_expected, statistic, num_cells = 0, 0.0, 0.0, 0
    for outcome, prob in probs.items():
        expected, count = prob * total, counts.get(outcome, 0)
        if expected < MIN_EXPECTED:
            small_count, small_expected = small_count + count, small_expected + expected
            continue
        statistic += (count - expected) ** 2 / expected
        num_cells += 1
    if small_expected > 0:
        # Merged, it may still be small: then it only counts for what goes beyond a few.
        statistic += (small_count - small_expected) ** 2 / max(small_expected, MIN_EXPECTED)
        num_cells += 1
    if num_cells < 2:
        return 1.0
    freedom = torch.tensor((num_cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def assert_fits(counts: Counter, probs: Mapping[Hashable, float]) -> None:
    """The counts may well come from these probabilities."""
    found = p_value(counts, probs)
    assert found > TOO_UNLIKELY, f"p = {found:.2g} over {sum(counts.values())} outcomes"
