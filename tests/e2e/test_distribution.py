"""A real model's sampled text has the distribution that its logits say, with drafts of any kind."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from gateway.tokenizer import ModelTokenizer
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import sampling_pb2
from tests.support.chi_square import assert_fits
from tests.support.draft_stream import run_draft_service
from tests.support.exact_model import ExactModel
from tests.support.in_process import running_target
from tests.support.token_requests import answer_all, make_request, wait_for_drafters

TEXT = "one two three four five. one two three four six. one two three four"
SETTINGS = {
    "top_k": {"temperature": 1.2, "top_k": 3},
    "top_p": {"temperature": 1.5, "top_p": 0.5},
}
Speculation = sampling_pb2.SpeculationParams
MODES = {
    "exact": Speculation.VERIFICATION_EXACT_MATCH,
    "rejection": Speculation.VERIFICATION_REJECTION,
}
BATCH = 32
NUM_REQUESTS = 320
NUM_TOKENS = 5
NUM_JUDGED = 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_a_real_model_keeps_its_distribution(
    smollm2_folder: Path, settings: dict, mode: int
) -> None:
    """SmolLM2 with lookup drafts, some of which stand and some do not."""
    prompt = ModelTokenizer.load(smollm2_folder).encode(TEXT)
    exact = ExactModel(smollm2_folder).outcomes(prompt, NUM_JUDGED, settings)
    chance = random.Random(1)
    counts: Counter = Counter()
    async with (
        run_draft_service(DraftSettings(port=0)) as drafter,
        running_target(
            smollm2_folder, drafters=drafter.address, max_sequences=BATCH, threads=2
        ) as target,
    ):
        await wait_for_drafters(target)
        for _ in range(NUM_REQUESTS // BATCH):
            requests = []
            for _ in range(BATCH):
                seed = chance.getrandbits(64)
                requests.append(make_request(prompt, NUM_TOKENS, k=3, seed=seed, **settings))
                requests[-1].speculation.verification = mode
            for answer in await answer_all(target, requests):
                counts[tuple(answer.ids[:NUM_JUDGED])] += 1
        drafts = (await target.status()).speculation
        assert 0 < drafts.accepted < drafts.drafted
    assert_fits(counts, exact)
