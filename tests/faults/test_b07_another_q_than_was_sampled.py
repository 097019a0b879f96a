"""B07. The distribution that a draft is checked against is not the one it was drawn from.

Symptom: a small but real bias at temperatures above 0, which greedy tests never see.

Right: the drafter sends what it drew from, cut and rounded as it is, and draws from exactly that. A
draft that was certain counts with probability 1. A draft whose distribution is missing, broken, or
gives it no chance is no draft at all, and counts as malformed.

Reported to DeepSpec (31: drawn in half precision, checked in float32), vLLM (40149: probabilities
dropped), dflash (74: the draft ignored the temperature); fixed in mlx-swift-lm by change 459.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2, sampling_pb2
from tests.support.chi_square import assert_fits
from tests.support.draft_stream import make_hello, make_open, open_stream, run_draft_service
from tests.support.drawn_drafts import Draw, Drawing
from tests.support.exact_model import ExactModel
from tests.support.in_process import running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
(PROMPT,) = random_prompts([10], VOCAB_SIZE, seed=8)
SETTINGS = {"temperature": 0.8, "top_k": 100, "top_p": 0.9}
FEW = {"temperature": 1.0, "top_k": 3}
REJECTION = sampling_pb2.SpeculationParams.VERIFICATION_REJECTION
BATCH = 50


def sizes(small: int, large: int) -> pytest.MarkDecorator:
    """A small number always, a large one in the slow suite."""
    slow = [pytest.mark.slow, pytest.mark.timeout(600)]
    few = pytest.param(small, marks=pytest.mark.timeout(60))
    return pytest.mark.parametrize("number", [few, pytest.param(large, marks=slow)])


@sizes(500, 5000)
async def test_the_drafter_sends_what_it_drew_from(tiny_model: Path, number: int) -> None:
    """One context and many seeds: every reply names the same distribution, its sum is 1, it gives
    the drawn token a chance, and the drawn tokens fit it."""
    settings = DraftSettings(
        port=0, proposer="model", model=str(tiny_model), dtype=chosen_dtype(), max_sequences=BATCH
    )
    counts: Counter = Counter()
    sent: set[tuple] = set()
    async with (
        run_draft_service(settings) as draft,
        open_stream(draft.address, make_hello(vocab_size=VOCAB_SIZE)) as stream,
    ):
        for first in range(0, number, BATCH):
            sequence_ids = range(first + 1, first + 1 + BATCH)
            await stream.send(*(opening_update(each) for each in sequence_ids))
            waited = set(sequence_ids)
            while waited:
                for proposal in (await stream.receive()).proposals:
                    if proposal.tokens and proposal.start == len(PROMPT):
                        (probs,) = proposal.sparse_probs
                        sent.add((tuple(probs.ids), tuple(probs.probs)))
                        counts[proposal.tokens[0]] += 1
                        waited.remove(proposal.sequence_id)
            await stream.send(
                *(
                    draft_pb2.SequenceUpdate(
                        sequence_id=each, epoch=1, update_seq=2, base_len=len(PROMPT), finished=True
                    )
                    for each in sequence_ids
                )
            )
    ((ids, probs),) = sent
    assert len(ids) == len(set(ids)) <= 64
    assert abs(sum(probs) - 1) < 1e-3
    own = ExactModel(tiny_model).probs(PROMPT, SETTINGS)
    assert list(ids) == list(own)[: len(ids)]
    assert_fits(counts, {i: p / sum(probs) for i, p in zip(ids, probs, strict=True)})


def opening_update(sequence_id: int) -> draft_pb2.SequenceUpdate:
    """The context with a seed of its own, and room for one token."""
    opening = make_open(len(PROMPT), seed=sequence_id * 7919, **SETTINGS)
    opening.verification = REJECTION
    return draft_pb2.SequenceUpdate(
        sequence_id=sequence_id, epoch=1, update_seq=1, tokens=PROMPT, window=1, open=opening
    )


@sizes(400, 4000)
async def test_a_certain_draft_has_probability_one(tiny_model: Path, number: int) -> None:
    """Always the likeliest token, reported as certain: the text still fits the target."""
    model = ExactModel(tiny_model)

    def draw(history: list[int], chance: random.Random) -> tuple[int, Mapping[int, float]]:
        token = next(iter(model.probs(history, FEW)))
        return token, {token: 1.0}

    counts: Counter = Counter()
    async with (
        ScriptedDrafter(Drawing(draw)) as drafter,
        running_target(tiny_model, drafters=drafter.address, max_sequences=BATCH) as target,
    ):
        await wait_for_drafters(target)
        for first in range(0, number, BATCH):
            requests = [request_with(seed, k=3) for seed in range(first, first + BATCH)]
            for answer in await answer_all(target, requests):
                counts[tuple(answer.ids[:3])] += 1
        drafts = (await target.status()).speculation
        assert 0 < drafts.accepted < drafts.drafted
    assert_fits(counts, model.outcomes(PROMPT, 3, FEW))


def request_with(seed: int, k: int):
    """Eight tokens of three candidates each."""
    request = make_request(PROMPT, 8, k=k, seed=seed, **FEW)
    request.speculation.verification = REJECTION
    return request


UNUSABLE: dict[str, Draw] = {
    "missing": lambda history, chance: (5, None),
    "no chance": lambda history, chance: (5, {6: 0.5, 7: 0.5}),
    "chance 0": lambda history, chance: (5, {5: 0.0, 7: 1.0}),
    "empty": lambda history, chance: (5, {}),
    "sum": lambda history, chance: (5, {5: 0.7}),
    "negative": lambda history, chance: (5, {5: 1.5, 6: -0.5}),
    "not a number": lambda history, chance: (5, {5: float("nan")}),
    "too many": lambda history, chance: (5, {i: 1 / 65 for i in range(65)}),
}


@pytest.mark.parametrize("draw", UNUSABLE.values(), ids=UNUSABLE)
async def test_a_draft_without_its_distribution_is_no_draft(tiny_model: Path, draw: Draw) -> None:
    """Nothing is verified, the tokens are those of a request without drafts, and it is counted."""
    async with (
        ScriptedDrafter(Drawing(draw)) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await ids_of_all(target, [request_with(seed, k=0) for seed in range(4)])
        auto = [request_with(seed, k=0) for seed in range(4)]
        for request in auto:
            request.speculation.mode = sampling_pb2.SpeculationParams.MODE_AUTO
            request.speculation.max_draft_tokens = 4
        drafts = (await target.status()).speculation
        async with asyncio.timeout(60):
            # Eight tokens may be there before a drafter has said a word.
            while not drafts.unused["malformed"]:
                assert await ids_of_all(target, auto) == off
                drafts = (await target.status()).speculation
        assert drafts.drafted == 0
        assert drafts.frames["malformed"] > 0


@pytest.mark.parametrize(("mode", "at_least"), [("MODE_AUTO", 9), ("MODE_FIXED", 30)])
async def test_right_drafts_without_distributions_are_plain_steps(
    tiny_model: Path, mode: str, at_least: int
) -> None:
    """A drafter whose tokens are right, so that it goes on behind them, but that never says what
    they were drawn from: no step waits long for it, and no prefix is sent twice. AUTO has enough
    after a window and a few tokens, FIXED asks to the end."""
    text = list(PROMPT)
    request = make_request(PROMPT, 40, temperature=0.8, seed=5)
    request.speculation.verification = REJECTION
    async with (
        ScriptedDrafter(Drawing(lambda history, chance: (text[len(history)], None))) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await target.ids(request)
        text += off
        request.speculation.mode = sampling_pb2.SpeculationParams.Mode.Value(mode)
        request.speculation.max_draft_tokens = 4
        assert await target.ids(request) == off
        drafts = (await target.status()).speculation
        assert (drafts.drafted, drafts.frames["resync"]) == (0, 0)
        assert drafts.unused["malformed"] >= at_least


async def test_a_prefix_is_not_sent_again_for_each_missing_distribution(tiny_model: Path) -> None:
    """Right tokens, every second one without what it was drawn from: what can be used is used, and
    the prefix, which is needed behind each gap, goes out more and more seldom."""
    text = list(PROMPT)

    def draw(history: list[int], chance: random.Random) -> tuple[int, Mapping[int, float] | None]:
        token = text[len(history)]
        return token, None if len(history) % 2 else {token: 1.0}

    request = make_request(PROMPT, 60)
    request.speculation.verification = REJECTION
    async with (
        ScriptedDrafter(Drawing(draw)) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await target.ids(request)
        text += off
        request.speculation.mode = sampling_pb2.SpeculationParams.MODE_FIXED
        request.speculation.max_draft_tokens = 4
        assert await target.ids(request) == off
        drafts = (await target.status()).speculation
        assert drafts.accepted == drafts.drafted > 0
        assert drafts.frames["resync"] < 10
