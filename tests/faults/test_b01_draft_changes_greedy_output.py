"""B01. Greedy output that changes when a draft is used.

Symptom: at temperature 0 an answer reads differently with a draft model than without. Rejected
tokens had stayed in the cache, or the tokens after them were computed at the wrong positions.

Right: the ids are the same in every case, whatever is proposed and however many tokens a round
verifies. A round gives one token more than it accepts, never more, never less.

Reported, among others, to mlx-lm (1423, 1470): a draft altered the text at temperature 0, first
seen with longer answers; to vLLM (7627) and text-generation-inference (2997) likewise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from outrider.serving.settings import DraftSettings
from tests.support.draft_scripts import Drafting, Mute, Partial, Perfect, Wrong
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    num_steps,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
KS = (1, 2, 3, 4, 8)
# Whole prompts in one step: no chunk of one token is left that could carry drafts already.
ROOMY = {"kv_tokens": 16384, "step_tokens": 8192}


async def check_grid(model: Path, lengths: range | tuple[int, ...], max_tokens: int) -> None:
    """Every k with every script; the requests of all prompts and k run in the same batches."""
    prompts = random_prompts(lengths, VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address, **ROOMY) as target,
    ):
        await wait_for_drafters(target)
        off = await ids_of_all(target, [make_request(each, max_tokens) for each in prompts])
        known = {tuple(prompt): ids for prompt, ids in zip(prompts, off, strict=True)}

        async def emitted_a_step(script: Drafting, k: int, expected: int) -> None:
            drafter.behaviour = script
            answers = await answer_all(
                target, [make_request(each, max_tokens, k=k) for each in prompts]
            )
            assert [answer.ids for answer in answers] == off
            for answer in answers:
                # The first token comes with the prompt, the others in full rounds and a last one.
                assert num_steps(answer) == 1 + -(-(max_tokens - 1) // expected)

        for k in KS:
            await emitted_a_step(Drafting(Wrong(known, VOCAB_SIZE)), k, expected=1)
            await emitted_a_step(Drafting(Perfect(known)), k, expected=k + 1)
            for right in range(1, k + 1):
                partial = Drafting(Partial(known, right, VOCAB_SIZE))
                await emitted_a_step(partial, k, expected=right + 1)
        assert drafter.record.problems == []


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.timeout(60)
async def test_ids_are_equal_under_every_script(tiny_model: Path) -> None:
    """Right, wrong and partly right drafts of every length: the ids of OFF, and exactly as many
    tokens a round as the script has right, plus one."""
    await check_grid(tiny_model, (5, 33, 300), max_tokens=20)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ids_are_equal_under_every_script_on_the_full_grid(tiny_model: Path) -> None:
    """The same for 20 prompts of 5 to 300 tokens with 128 tokens each."""
    await check_grid(tiny_model, (*range(5, 285, 15), 300), max_tokens=128)


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.parametrize("proposer", ["ngram", "model"])
async def test_ids_are_equal_with_the_real_drafter(tiny_model: Path, proposer: str) -> None:
    """The draft service itself, guessing from the text or with the target's own weights, fixed and
    under the controller: the ids of OFF, and at fixed k its drafts are used."""
    prompts = random_prompts((5, 16, 17, 90, 300), VOCAB_SIZE)
    settings = DraftSettings(port=0, proposer=proposer, model=str(tiny_model), dtype=chosen_dtype())
    async with (
        run_draft_service(settings) as drafter,
        running_target(tiny_model, drafters=drafter.address, **ROOMY) as target,
    ):
        await wait_for_drafters(target)
        off = await ids_of_all(target, [make_request(each, 100) for each in prompts])
        for k, mode in [
            *((k, SpeculationMode.FIXED) for k in KS),
            (8, SpeculationMode.AUTO),
        ]:
            requests = [make_request(each, 100, k=k, mode=mode) for each in prompts]
            answers = await answer_all(target, requests)
            assert [answer.ids for answer in answers] == off
            if mode is SpeculationMode.FIXED:
                assert sum(answer.speculation.accepted for answer in answers) > 0
