"""B16. A preempted request that goes on with drafts made before.

Symptom: after a preemption a token is lost, doubled or wrong, or the engine dies: drafts from
before are verified as if nothing had happened, or the output of a step that was in flight is taken
in after the request had lost its place.

Right: requests are preempted, and yet each stream is that of its solo run without drafts, with
indexes that rise by one and exact usage. A draft that no longer fits is dropped and counted.

Fixed in vLLM by changes 31955 (drafts from before were used after resuming), 49620 (a step in
flight was applied after the preemption) and 42117.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from protos.outrider.v1 import target_pb2
from tests.support.draft_scripts import Drafting, Late, Mute, Partial, Perfect, TokenSource
from tests.support.in_process import running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)
from tests.support.token_streams import assert_counts_balance, quiet_status, slow_steps

VOCAB_SIZE = 384
NUM_TOKENS = 120
K = 6
PROMPTS = random_prompts([40, 40, 40], VOCAB_SIZE, seed=16)
SMALL = {"kv_tokens": 240, "step_tokens": 32, "max_model_len": 256}
"""The pool holds one and a half of three requests."""
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 2**63 + 5}}
STEP_S = 0.004


def requests(
    sampling: dict[str, float], k: int = 0, mode: SpeculationMode | None = None
) -> list[target_pb2.TokenRequest]:
    """All three."""
    return [make_request(each, NUM_TOKENS, k=k, mode=mode, **sampling) for each in PROMPTS]


async def check(
    model: Path,
    sampling: dict[str, float],
    mode: SpeculationMode,
    delay_s: float,
    *,
    prefix_cache: bool = True,
) -> target_pb2.TargetGetStatusResponse:
    """Right drafts, then half right ones, late by `delay_s`; the status at the end."""
    async with running_target(model) as plain:
        off = await ids_of_all(plain, requests(sampling))
    known = {tuple(prompt): ids for prompt, ids in zip(PROMPTS, off, strict=True)}
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(
            model, drafters=drafter.address, prefix_cache=prefix_cache, draft_wait_ms=2, **SMALL
        ) as target,
    ):
        await wait_for_drafters(target)
        slow_steps(target, STEP_S)
        sources: tuple[TokenSource, ...] = (Perfect(known), Partial(known, 3, VOCAB_SIZE))
        for source in sources:
            before = (await target.status()).load.preemptions
            drafter.behaviour = Late(Drafting(source), delay_s)
            answers = await answer_all(target, requests(sampling, K, mode))
            assert [each.ids for each in answers] == off
            for answer in answers:
                assert answer.finish.usage.prompt_tokens == 40
                assert answer.finish.usage.cached_prompt_tokens <= 40
            status = await quiet_status(target)
            assert status.load.preemptions > before
            assert_counts_balance(status)
        assert drafter.record.problems == []
        return status


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_replies_in_flight(tiny_model: Path, sampling: dict[str, float]) -> None:
    """Drafts come some steps late and nobody waits for them, so that there is always a reply in
    flight when a request loses its place; what comes too late is counted, what fits is used."""
    status = await check(tiny_model, sampling, SpeculationMode.AUTO, 3 * STEP_S)
    unused = status.speculation.unused
    assert unused["late"] + unused["stale"] + unused["mismatch"] > 0


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_replies_that_are_waited_for(tiny_model: Path, prefix_cache: bool) -> None:
    """Every round is a full block of drafts, whether the blocks of a request that was preempted
    are found again or computed anew."""
    status = await check(tiny_model, {}, SpeculationMode.FIXED, STEP_S, prefix_cache=prefix_cache)
    assert status.speculation.accepted > NUM_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.FIXED])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_replies_after_fifty_milliseconds(
    tiny_model: Path, sampling: dict[str, float], mode: SpeculationMode
) -> None:
    """A slow drafter, waited for or not."""
    await check(tiny_model, sampling, mode, 0.05)
