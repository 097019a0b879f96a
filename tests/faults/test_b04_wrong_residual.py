"""B04. The distribution after a rejection is not max(0, target - draft), normalised.

Symptom: sampled text is biased, and after a rejection come tokens that cannot come at all.

Right: however bad the drafts are, as long as they are reported truthfully the text has exactly the
target's distribution, with drafts as without, and nothing comes that the filters have removed.

transformers put the residual through a softmax (fixed by change 28508); vllm-ascend overwrote the
target's probabilities in place before it used them again (fixed by change 2881).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.chi_square import assert_fits
from tests.support.draft_scripts import Late
from tests.support.drawn_drafts import Drawing
from tests.support.exact_model import ExactModel
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
NUM_TOKENS = 8
NUM_JUDGED = 3
(PROMPT,) = random_prompts([11], VOCAB_SIZE, seed=4)
SETTINGS = {"temperature": 1.0, "top_k": 2}
BATCH = 40


def request_with(seed: int, k: int, mode: SpeculationMode | None) -> target_pb2.TokenRequest:
    """Eight tokens, so that rounds have room for drafts where the first three are judged."""
    request = make_request(PROMPT, NUM_TOKENS, k=k, mode=mode, seed=seed, **SETTINGS)
    request.speculation.verification = sampling_pb2.SpeculationParams.VERIFICATION_REJECTION
    return request


async def count_triples(
    target: Target, num_requests: int, k: int, mode: SpeculationMode | None = None
) -> Counter:
    """How often each text began."""
    chance = random.Random(k)
    counts: Counter = Counter()
    for _ in range(num_requests // BATCH):
        requests = [request_with(chance.getrandbits(64), k, mode) for _ in range(BATCH)]
        for answer in await answer_all(target, requests):
            counts[tuple(answer.ids[:NUM_JUDGED])] += 1
    return counts


NUM_REQUESTS = pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(400, marks=pytest.mark.timeout(60)),
        pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)


def bad_drawing(model: ExactModel) -> Drawing:
    """Of two allowed tokens it takes the less likely one 19 times out of 20, and says so."""

    def draw(history: list[int], chance: random.Random) -> tuple[int, Mapping[int, float]]:
        likely, unlikely = model.probs(history, SETTINGS)
        token = unlikely if chance.random() < 0.95 else likely
        return token, {unlikely: 0.95, likely: 0.05}

    return Drawing(draw)


@NUM_REQUESTS
async def test_bad_drafts_do_not_bend_the_distribution(tiny_model: Path, num_requests: int) -> None:
    """Drafts of which most are rejected, in rounds of three; and without any."""
    model = ExactModel(tiny_model)
    exact = model.outcomes(PROMPT, NUM_JUDGED, SETTINGS)
    assert len(exact) == 8
    async with (
        ScriptedDrafter(bad_drawing(model)) as drafter,
        running_target(tiny_model, drafters=drafter.address, max_sequences=BATCH) as target,
    ):
        await wait_for_drafters(target)
        assert_fits(await count_triples(target, num_requests, k=3), exact)
        drafts = (await target.status()).speculation
        assert 0.1 * drafts.drafted < drafts.accepted < 0.9 * drafts.drafted
        assert drafts.drafted > num_requests
        assert_fits(await count_triples(target, num_requests // 2, k=0), exact)
        assert (await target.status()).speculation.drafted == drafts.drafted


@NUM_REQUESTS
async def test_drafts_that_come_late_do_not_bend_it_either(
    tiny_model: Path, num_requests: int
) -> None:
    """Proposals cross updates, are overtaken and are cut; the controller decides what is verified.
    None of that may look at what was drawn."""
    model, chance = ExactModel(tiny_model), random.Random(1)
    late = Late(bad_drawing(model), lambda sequence: chance.choice([0.0, 0.002, 0.02]))
    async with (
        ScriptedDrafter(late) as drafter,
        running_target(tiny_model, drafters=drafter.address, max_sequences=BATCH) as target,
    ):
        await wait_for_drafters(target)
        counts = await count_triples(target, num_requests, k=3, mode=SpeculationMode.AUTO)
        drafts = (await target.status()).speculation
        assert 0 < drafts.accepted < drafts.drafted < drafts.proposed
    assert_fits(counts, model.outcomes(PROMPT, NUM_JUDGED, SETTINGS))
