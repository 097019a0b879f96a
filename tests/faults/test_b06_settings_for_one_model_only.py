"""B06. Sampling settings that reach only one of the two models.

Symptom: acceptance looks odd, and the text follows the unfiltered target: tokens outside top_p or
top_k, or the wrong temperature.

Right: in each setting the text has the target's filtered distribution, whichever way drafts are
checked, at drafted positions as at those of the bonus token; no token outside the filters.

vLLM scored with the target's default temperature and top_p while the draft used the request's
(issue 9834, fixed by change 10198).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import sampling_pb2
from tests.support.chi_square import assert_fits
from tests.support.draft_stream import run_draft_service
from tests.support.exact_model import ExactModel
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
NUM_TOKENS = 8
(PROMPT,) = random_prompts([9], VOCAB_SIZE, seed=6)
BATCH = 30
Speculation = sampling_pb2.SpeculationParams
EXACT, REJECTION = Speculation.VERIFICATION_EXACT_MATCH, Speculation.VERIFICATION_REJECTION
MODES = pytest.mark.parametrize("mode", [EXACT, REJECTION], ids=["exact", "rejection"])
SETTINGS = {
    "cold": {"temperature": 0.3},
    "hot, top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
}
NUM_REQUESTS = pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(120, marks=pytest.mark.timeout(60)),
        pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)


async def count_beginnings(
    target: Target, settings: dict, mode: int, *, k: int, depth: int, num_requests: int
) -> Counter:
    """How often each text began."""
    chance = random.Random(depth)
    counts: Counter = Counter()
    for _ in range(num_requests // BATCH):
        requests = []
        for _ in range(BATCH):
            seed = chance.getrandbits(64)
            requests.append(make_request(PROMPT, NUM_TOKENS, k=k, seed=seed, **settings))
            requests[-1].speculation.verification = mode
        for answer in await answer_all(target, requests):
            counts[tuple(answer.ids[:depth])] += 1
    return counts


@NUM_REQUESTS
@MODES
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_settings_hold_with_another_model_as_draft(
    tiny_model: Path, tmp_path: Path, settings: dict, mode: int, num_requests: int
) -> None:
    """A draft of other weights, four tokens a round: mostly rejections."""
    other = make_tiny_model(tmp_path / "draft", vocab_size=VOCAB_SIZE, seed=1)
    exact = ExactModel(tiny_model).outcomes(PROMPT, 2, settings)
    drafting = DraftSettings(port=0, proposer="model", model=str(other), dtype=chosen_dtype())
    async with (
        run_draft_service(drafting) as drafter,
        running_target(tiny_model, drafters=drafter.address, max_sequences=BATCH) as target,
    ):
        await wait_for_drafters(target)
        counts = await count_beginnings(
            target, settings, mode, k=4, depth=2, num_requests=num_requests
        )
        assert_fits(counts, exact)
        assert (await target.status()).speculation.drafted > num_requests


@NUM_REQUESTS
@MODES
async def test_the_bonus_token_obeys_too(tiny_model: Path, mode: int, num_requests: int) -> None:
    """The target's own weights as draft, one token a round: nearly all stand, so every second
    token is a bonus, and the third of a text is one."""
    settings = SETTINGS["hot, top_k"]
    exact = ExactModel(tiny_model).outcomes(PROMPT, 3, settings)
    assert len(exact) == 27
    drafting = DraftSettings(port=0, proposer="model", model=str(tiny_model), dtype=chosen_dtype())
    async with (
        run_draft_service(drafting) as drafter,
        running_target(tiny_model, drafters=drafter.address, max_sequences=BATCH) as target,
    ):
        await wait_for_drafters(target)
        counts = await count_beginnings(
            target, settings, mode, k=1, depth=3, num_requests=num_requests
        )
        assert_fits(counts, exact)
        drafts = (await target.status()).speculation
        assert drafts.accepted >= 0.99 * drafts.drafted > num_requests
