"""Batcher, drafter client and scripted drafters over real connections: the text stays the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from outrider.params import SpeculationMode
from target_service.request import Request
from tests.support.draft_scripts import (
    Behaviour,
    Closing,
    Crossing,
    Drafting,
    Empty,
    Going,
    Junk,
    Late,
    Mute,
    Partial,
    Perfect,
    ScriptedSequence,
    Wrong,
)
from tests.support.function_target import (
    STOP_ID,
    WAIT_S,
    Target,
    output_of,
    running_target,
    solo,
)
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.target_parts import MAX_DRAFT_TOKENS, VOCAB_SIZE

LONG = 60


def known(sequence: ScriptedSequence) -> list[int]:
    """What the target will say."""
    return solo(sequence.prompt, sequence.opening.max_len - sequence.opening.prompt_len)


def perfect() -> Behaviour:
    """Always right, up to the end."""
    return Drafting(Perfect(known))


BEHAVIOURS: dict[str, Callable[[], Behaviour]] = {
    "perfect": perfect,
    "wrong": lambda: Drafting(Wrong(known, VOCAB_SIZE)),
    "partly right": lambda: Drafting(Partial(known, 2, VOCAB_SIZE)),
    "uneven": lambda: Drafting(Perfect(known), lengths=[2, 0, 5, 1]),
    "crossing": lambda: Crossing(perfect(), 2),
    "late": lambda: Late(perfect(), 0.01, every=2),
    "partly right and late": lambda: Late(Drafting(Partial(known, 1, VOCAB_SIZE)), 0.004),
    "empty": Empty,
    "mute": Mute,
    "junk": Junk,
    "closing": lambda: Closing(perfect(), 9),
    "forgetting": lambda: Going(perfect(), 3, every_epoch=True),
    "refusing": lambda: Going(perfect(), 2, 3),
}


async def connected(target: Target) -> None:
    """Until every drafter is ready."""
    async with asyncio.timeout(WAIT_S):
        while not all(client.ready for client in target.hub.clients):
            await asyncio.sleep(0.005)


def long_prompt(seed: int) -> list[int]:
    """A prompt whose text does not stop early."""
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(1, 97) for _ in range(5)]
        if STOP_ID not in solo(prompt, LONG):
            return prompt


def submit_many(target: Target, seed: int, num_requests: int) -> dict[Request, list[int]]:
    """Requests of every kind, and the texts that they have to give."""
    rng = random.Random(seed)
    expected = {}
    for _ in range(num_requests):
        prompt = [rng.randrange(1, 97) for _ in range(rng.randrange(1, 12))]
        max_tokens = rng.randrange(1, LONG)
        mode = rng.choice([SpeculationMode.AUTO, SpeculationMode.AUTO, SpeculationMode.OFF])
        request = target.submit(prompt, max_tokens, mode=mode, max_wait_s=0.01)
        expected[request] = solo(prompt, max_tokens)
    return expected


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_no_drafter_changes_a_text_or_the_books(name):
    """Whatever the drafter does: every text as if alone, every proposed token accounted for."""
    async with (
        ScriptedDrafter(BEHAVIOURS[name]()) as drafter,
        running_target(drafter.address, num_blocks=48) as target,
    ):
        await connected(target)
        expected = submit_many(target, seed=1, num_requests=12)
        await asyncio.sleep(0.01)
        for request in list(expected)[::4]:
            target.batcher.cancel(request)
            assert output_of(request).ids == expected[request][: len(output_of(request).ids)]
            del expected[request]
        await target.settle()
        for request, ids in expected.items():
            assert output_of(request).ids == ids
        assert drafter.record.problems == []
        if name in ("perfect", "uneven", "crossing", "late"):
            assert target.hub.frames["resync"] == 0


@pytest.mark.parametrize("updates", [0, 1, 2, 3])
async def test_crossing_frames_do_not_cost_a_perfect_drafter_its_acceptance(updates):
    """Proposals that cross up to three updates on the wire are right all the same."""
    behaviour = Crossing(perfect(), updates) if updates else perfect()
    async with ScriptedDrafter(behaviour) as drafter, running_target(drafter.address) as target:
        await connected(target)
        target.model.step_s = 0.003  # else the text is over before anything has crossed the wire
        for seed in range(4):
            target.submit(long_prompt(seed), LONG, mode=SpeculationMode.AUTO, max_wait_s=0.005)
        await target.settle()
        counts = target.batcher.speculation
        assert counts.accepted == counts.drafted > 0
        assert target.hub.frames["resync"] == 0


@pytest.mark.parametrize("k", range(1, MAX_DRAFT_TOKENS + 1))
async def test_fixed_verifies_exactly_k_each_round(k):
    """A perfect drafter, waited for: every round but the last ones has k drafts, all accepted."""
    async with ScriptedDrafter(perfect()) as drafter, running_target(drafter.address) as target:
        await connected(target)
        prompt = long_prompt(k)
        request = target.submit(prompt, LONG, mode=SpeculationMode.FIXED, draft_tokens=k)
        await target.settle()
        counts = request.counts
        assert counts.accepted == counts.drafted
        assert counts.rounds + counts.plain_steps <= -(-LONG // (k + 1)) + 2
        assert len(counts.accepted_per_position) == k


async def test_a_drafter_that_dies_and_comes_back_is_used_again():
    """In the middle of texts: they go on without drafts, then with them, unchanged."""
    async with ScriptedDrafter(perfect()) as drafter, running_target(drafter.address) as target:
        await connected(target)
        target.model.step_s = 0.002
        expected = submit_many(target, seed=2, num_requests=8)
        await asyncio.sleep(0.02)
        await drafter.stop()
        expected |= submit_many(target, seed=3, num_requests=4)
        await target.settle()
        await drafter.start()
        await connected(target)
        accepted = target.batcher.speculation.accepted
        expected |= submit_many(target, seed=4, num_requests=8)
        await target.settle()
        assert target.batcher.speculation.accepted > accepted
        for request, ids in expected.items():
            assert output_of(request).ids == ids


async def test_two_drafters_share_the_sequences_and_stand_in_for_each_other():
    """When one of them goes, its sequences go on with the other's drafts."""
    async with ScriptedDrafter(perfect()) as first, ScriptedDrafter(perfect()) as second:
        async with running_target(first.address, second.address) as target:
            await connected(target)
            expected = submit_many(target, seed=5, num_requests=10)
            await second.record.wait_for(lambda record: bool(record.updates))
            await first.stop()
            await target.settle()
            for request, ids in expected.items():
                assert output_of(request).ids == ids
        assert first.record.problems == second.record.problems == []
        assert first.record.updates
