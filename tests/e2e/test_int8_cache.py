"""The promises with keys and values in int8: a token's stored bytes depend on that token alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.model import LlamaModel
from outrider.engine.numerics import numerics_id
from outrider.serving.settings import DraftSettings
from tests.support.draft_scripts import Drafting, Mute, Partial
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)
from tests.support.token_streams import assert_counts_balance, quiet_status

pytestmark = pytest.mark.timeout(90)

VOCAB_SIZE = 384
NUM_TOKENS = 100
PROMPTS = random_prompts([40, 33, 57], VOCAB_SIZE, seed=8)
SMALL = {"kv_tokens": 240, "step_tokens": 32, "max_model_len": 256}
"""The pool holds one and a half of three requests, and prompts come in chunks."""
each_dtype = pytest.mark.parametrize("dtype", ["float32", "int8"])


@each_dtype
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 77}], ids=["greedy", "seeded"]
)
async def test_drafts_and_preemptions_change_no_token(
    tiny_model: Path, dtype: str, sampling: dict[str, float]
) -> None:
    """A roomy target without drafts, each request alone, and a tight one with half-right drafts."""
    plain = [make_request(prompt, NUM_TOKENS, **sampling) for prompt in PROMPTS]
    drafted = [make_request(prompt, NUM_TOKENS, k=4, **sampling) for prompt in PROMPTS]
    async with running_target(tiny_model, dtype=dtype, kv_dtype="int8") as target:
        off = [(await ids_of_all(target, [request]))[0] for request in plain]
    known = {tuple(prompt): ids for prompt, ids in zip(PROMPTS, off, strict=True)}
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(
            tiny_model, drafters=drafter.address, dtype=dtype, kv_dtype="int8", **SMALL
        ) as target,
    ):
        await wait_for_drafters(target)
        drafter.behaviour = Drafting(Partial(known, 3, VOCAB_SIZE))
        answers = await answer_all(target, drafted)
        assert [answer.ids for answer in answers] == off
        status = await quiet_status(target)
        assert status.load.preemptions > 0
        assert 0 < status.speculation.accepted < status.speculation.drafted
        assert_counts_balance(status)


async def test_blocks_that_are_found_again_change_no_token(tiny_model: Path) -> None:
    """A longer text over the blocks of a shorter one, and of the same one."""
    (prompt,) = random_prompts([64], VOCAB_SIZE, seed=9)
    async with running_target(tiny_model, kv_dtype="int8", prefix_cache=False) as target:
        (first,) = await ids_of_all(target, [make_request(prompt, 40)])
    async with running_target(tiny_model, kv_dtype="int8") as target:
        await ids_of_all(target, [make_request(prompt, 20)])
        longer, same = [*prompt, *first[:20]], prompt
        for again, expected in ((longer, first[20:]), (same, first)):
            (answer,) = await answer_all(target, [make_request(again, len(expected))])
            assert answer.finish.usage.cached_prompt_tokens >= 48
            assert answer.ids == expected


async def test_a_drafter_with_such_a_cache_proposes_what_it_would_say(tiny_model: Path) -> None:
    """The target's own weights and cache: every draft is accepted; both say how they keep it."""
    settings = DraftSettings(
        port=0, proposer="model", model=str(tiny_model), dtype="float32", kv_dtype="int8"
    )
    async with (
        run_draft_service(settings) as draft,
        running_target(
            tiny_model, drafters=draft.address, dtype="float32", kv_dtype="int8"
        ) as target,
    ):
        await wait_for_drafters(target)
        answers = await answer_all(target, [make_request(each, 40, k=4) for each in PROMPTS])
        drafted = sum(answer.speculation.drafted for answer in answers)
        assert sum(answer.speculation.accepted for answer in answers) == drafted > 0
        for pool in ((await target.status()).pool, (await draft.status()).pool):
            # Two layers, keys and values, 16 tokens of two heads of 16 values and a scale.
            assert (pool.kv_dtype, pool.block_bytes) == ("int8", 2 * 2 * 16 * 2 * 18)


async def test_the_same_bytes_hold_more_tokens(tiny_model: Path) -> None:
    """A pool that is given in bytes has more blocks, and a name of its own for the numbers."""
    pools, names = [], []
    for kv_dtype in ("auto", "int8"):
        async with running_target(
            tiny_model, dtype="bfloat16", kv_dtype=kv_dtype, kv_tokens=0, kv_bytes=1 << 20
        ) as target:
            status = await target.status()
            pools.append((status.pool.kv_dtype, status.pool.total))
            names.append(status.numerics_id)
        model = LlamaModel.load(tiny_model, "bfloat16", kv_dtype=kv_dtype)
        assert numerics_id(model) == names[-1]
    assert pools == [("bfloat16", (1 << 20) // 4096), ("int8", (1 << 20) // 2304)]
    assert names[0] != names[1]
