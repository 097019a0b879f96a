"""Two models on the same cores, each with a thread a core: they share, and do not fight."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.serving.cores import usable_cores
from outrider.serving.settings import DraftSettings, TargetSettings
from tests.support.busy_model import BusyModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = 5
SECONDS = 1.0
MOST = 3.5
"""Times slower beside another one. Sharing alone is 2; threads that spin at each other are 5 to
10 times slower, the issue says, and so they were."""


@pytest.mark.parametrize("spin_us", sorted({0, TargetSettings.spin_us, DraftSettings.spin_us}))
def test_neither_is_slowed_by_more_than_sharing(smollm2_folder: Path, spin_us: int) -> None:
    """Alone, together, alone, together: the best of each says how much slower each becomes."""
    threads = usable_cores()
    alone, together = ([0.0, 0.0], [0.0, 0.0])
    with (
        BusyModel(smollm2_folder, threads=threads, spin_us=spin_us) as one,
        BusyModel(smollm2_folder, threads=threads, spin_us=spin_us) as other,
    ):
        models = (one, other)
        for _ in range(ROUNDS):
            for number, model in enumerate(models):
                model.begin(SECONDS)
                alone[number] = max(alone[number], model.end())
            for model in models:
                model.begin(SECONDS)
            for number, model in enumerate(models):
                together[number] = max(together[number], model.end())
    slower = [a / b for a, b in zip(alone, together, strict=True)]
    print(f"spin {spin_us} us: alone {alone}, together {together} steps/s, slower {slower}")
    assert max(slower) <= MOST
