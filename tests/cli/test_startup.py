"""How long `outrider up` takes."""

from __future__ import annotations

import os

import pytest

from bench.startup import one_start

MUST_S = 15.0
STARTS = 3


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("smollm2_folder")
def test_the_stack_is_ready_in_15_seconds() -> None:
    """From the command to /readyz of the gateway, the model being in the cache; of three starts the
    shortest, because other work of the machine is not ours. The first answer comes soon after."""
    starts = [one_start([]) for _ in range(STARTS)]
    best = min(starts, key=lambda start: start.ready_s)
    print(f"ready after {[round(s.ready_s, 2) for s in starts]} s, load {os.getloadavg()[0]:.1f}")
    assert best.ready_s <= MUST_S
    assert best.first_token_s - best.ready_s < 5
    assert set(best.phases) == {"gateway", "target", "draft"}
