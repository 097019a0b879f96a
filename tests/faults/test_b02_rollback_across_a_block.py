"""B02. A rollback that crosses a block boundary.

Symptom: rejected drafts had spilled into a new block of the cache. Afterwards the block table keeps
a block that is free elsewhere, or the next position leaves one out; later the service hangs or the
text goes wrong.

Right: the ids of OFF for every offset in a block at which a round can start, also while a neighbour
takes every freed block at once. After each round a request holds the blocks of its committed tokens
and no more, and at the end the pool is empty.

Reported to TensorRT-LLM (16448): taking drafts back freed a block that other books still named; and
to llama.cpp (26478): the cache had a hole in its positions where a block began.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from target_service.scheduler import Scheduler
from tests.support.draft_scripts import (
    Behaviour,
    Drafting,
    Mute,
    Partial,
    Reply,
    ScriptedSequence,
    Wrong,
)
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
BLOCK_SIZE = 16
K = 8
NUM_TOKENS = 60
SMALL = {"kv_tokens": 64 * BLOCK_SIZE, "step_tokens": 32, "max_model_len": 256}


class WatchingBlocks:
    """Looks at the target's pool each time it asks for drafts.

    The sequence that asks then waits for them, as k is fixed and everything behind a wrong draft is
    thrown away: it is in no step, and holds what its last round left. Others may be in one, and
    hold what their drafts need on top.
    """

    def __init__(self, behaviour: Behaviour, scheduler: Scheduler) -> None:
        self.looks = 0
        self.problems: list[str] = []
        self._behaviour = behaviour
        self._scheduler = scheduler

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if sequence.window:
            self.looks += 1
            self.problems += self._scheduler.check_integrity()
            for request in self._scheduler.running:
                state = request.sequence
                committed = -(-state.num_tokens // BLOCK_SIZE)
                computed = -(-state.num_computed // BLOCK_SIZE)
                # The newest token is computed by the next step, and gets its block at the latest
                # then.
                asks = state.token_ids[: len(sequence.confirmed)] == list(sequence.confirmed)
                if not asks:
                    committed = -(-(state.num_tokens + K) // BLOCK_SIZE)
                if not computed <= len(state.block_table) <= committed:
                    self.problems.append(f"{len(state.block_table)} blocks for {state.num_tokens}")
        return self._behaviour.answer(sequence)


async def check_scripts(
    target: Target,
    drafter: ScriptedDrafter,
    prompts: list[list[int]],
    off: list[list[int]],
    neighbours: int,
) -> None:
    """Every prompt with WRONG and with PARTIAL(3), `neighbours` others running with it."""
    assert target.service.batcher is not None
    scheduler = target.service.batcher.scheduler
    known = {tuple(prompt): ids for prompt, ids in zip(prompts, off, strict=True)}
    scripts = (Wrong(known, VOCAB_SIZE), Partial(known, 3, VOCAB_SIZE))
    for script in scripts:
        drafter.behaviour = watching = WatchingBlocks(Drafting(script), scheduler)
        for first in range(0, len(prompts), 1 + neighbours):
            some = slice(first, first + 1 + neighbours)
            requests = [make_request(prompt, NUM_TOKENS, k=K) for prompt in prompts[some]]
            answers = await answer_all(target, requests)
            assert [answer.ids for answer in answers] == off[some]
            assert (await target.status()).pool.used == 0
        assert watching.problems == []
        assert watching.looks > len(prompts) * NUM_TOKENS // 6
        assert drafter.record.problems == []


async def check_lengths(model: Path, lengths: range | tuple[int, ...], neighbours: int) -> None:
    """The prompts of these lengths, on a small pool."""
    prompts = random_prompts(lengths, VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address, **SMALL) as target,
    ):
        await wait_for_drafters(target)
        off = await ids_of_all(target, [make_request(each, NUM_TOKENS) for each in prompts])
        await check_scripts(target, drafter, prompts, off, neighbours)


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("neighbours", [0, 1])
async def test_rejected_drafts_leave_no_block_behind(tiny_model: Path, neighbours: int) -> None:
    """Prompts that end around block boundaries: alone, and with a neighbour that takes what is
    freed."""
    await check_lengths(tiny_model, (1, 14, 15, 16, 17, 31, 32, 33), neighbours)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("neighbours", [0, 1])
async def test_rollback_at_every_prompt_length(tiny_model: Path, neighbours: int) -> None:
    """The same for every length from 1 to 48."""
    await check_lengths(tiny_model, range(1, 49), neighbours)
