"""B17. A prompt that is computed in chunks while others decode with drafts.

Symptom: the first words of an answer are wrong or go on with the prompt, but only on a cold cache
and when the prompt did not fit in one step: a chunk that was not the last one gave a token, or the
scores of a prompt belong to another request.

Right: the ids and the scores of one whole pass, for every length around the size of a step. No
token and no call for drafts before the last chunk is done. The neighbour that decodes says what it
says alone, and takes part in at least every second step. No step is larger than its budget, drafts
included.

Reported to vLLM (53488: scores of prompts mixed up; fixed in 9291 and 10132: chunks that were not
the last one gave filler tokens); model-serving-minefield (36): garbled only on a cold prefill.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from protos.outrider.v1 import target_pb2
from target_service.request import Request
from target_service.scheduler import Plan
from tests.support.draft_scripts import Behaviour, Drafting, Mute, Partial, Reply, ScriptedSequence
from tests.support.in_process import Answer, Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import TimedStream, slow_steps

VOCAB_SIZE = 384
BUDGET = 32
K = 4
NUM_TOKENS = 16
LENGTHS = (31, 32, 33, 63, 64, 65, 200, 500)
PROMPTS = random_prompts(LENGTHS, VOCAB_SIZE, seed=17)
(NEIGHBOUR,) = random_prompts([9], VOCAB_SIZE, seed=18)
NEIGHBOUR_TOKENS = 700
SIZES = {"kv_tokens": 4096, "prefix_cache": False, "draft_wait_ms": 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of 1,024 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=1024)


def request_for(prompt: list[int], k: int, scores: bool) -> target_pb2.TokenRequest:
    """Greedy; with the prompt's own scores if asked for."""
    request = make_request(prompt, NUM_TOKENS, k=k)
    if scores:
        request.prompt_logprobs = 2
    return request


class Steps:
    """Every plan that the device got: how many tokens, for whom."""

    def __init__(self, target: Target) -> None:
        self.plans: list[tuple[int, set[Request]]] = []
        batcher = target.service.batcher
        assert batcher is not None
        run_step = batcher._run_step

        def run(plan: Plan) -> object:
            self.plans.append((plan.batch.num_tokens, {share.request for share in plan.shares}))
            return run_step(plan)

        batcher._run_step = run

    def check(self) -> None:
        """Sizes, and that a text which has begun is in at least every second step to its end."""
        assert max(size for size, _ in self.plans) <= BUDGET
        neighbour = next(iter(self.plans[0][1]))
        present = [neighbour in requests for _, requests in self.plans]
        last = len(present) - 1 - present[::-1].index(True)
        for first, second in zip(present[:last], present[1:last], strict=False):
            assert first or second, "the neighbour was left out of two steps in a row"


@dataclass
class NotBeforeTheFirstToken:
    """Sees to it that drafts are asked for only behind a token of the target."""

    behaviour: Behaviour
    early: list[int] = field(default_factory=list)

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if sequence.window and len(sequence.confirmed) <= sequence.opening.prompt_len:
            self.early.append(sequence.opening.prompt_len)
        return self.behaviour.answer(sequence)


async def whole(model: Path, scores: bool) -> tuple[list[Answer], list[int]]:
    """What the prompts and the neighbour give when every prompt fits in one step."""
    async with running_target(model, step_tokens=1024, **SIZES) as target:
        answers = [await target.answer(request_for(each, 0, scores)) for each in PROMPTS]
        return answers, await target.ids(make_request(NEIGHBOUR, NEIGHBOUR_TOKENS))


def scores_of(answer: Answer) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Ids, values and alternatives of the prompt."""
    return [
        (token.id, token.logprob, [(each.id, each.logprob) for each in token.top])
        for token in answer.prompt_tokens
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("at_once", "scores"),
    [
        (1, False),
        (4, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
async def test_chunks_beside_drafts(model: Path, at_once: int, scores: bool) -> None:
    """Prompts one after the other or several at once, with or without scores of their own, while a
    neighbour decodes with drafts."""
    expected, neighbour_ids = await whole(model, scores)
    known = {
        tuple(prompt): answer.ids for prompt, answer in zip(PROMPTS, expected, strict=True)
    } | {tuple(NEIGHBOUR): neighbour_ids}
    behaviour = NotBeforeTheFirstToken(Drafting(Partial(known, 3, VOCAB_SIZE)))
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address, step_tokens=BUDGET, **SIZES) as target,
    ):
        await wait_for_drafters(target)
        drafter.behaviour = behaviour
        slow_steps(target, 0.004)  # so that drafts pay, however fast the machine
        steps = Steps(target)
        neighbour = TimedStream()
        async with asyncio.TaskGroup() as group:
            # AUTO, as a FIXED request may sit steps out until its drafts are there.
            long = make_request(NEIGHBOUR, NEIGHBOUR_TOKENS, k=K, mode=SpeculationMode.AUTO)
            group.create_task(neighbour.run(target.stub, long, 50))
            await neighbour.wait_tokens(5)
            for first in range(0, len(PROMPTS), at_once):
                some = range(first, min(first + at_once, len(PROMPTS)))
                answers = await asyncio.gather(
                    *(target.answer(request_for(PROMPTS[i], K, scores)) for i in some)
                )
                for i, answer in zip(some, answers, strict=True):
                    assert answer.ids == expected[i].ids, f"prompt of {LENGTHS[i]}"
                    assert scores_of(answer) == scores_of(expected[i])
                    assert answer.finish.usage.cached_prompt_tokens == 0
            assert neighbour.finish is None, "the neighbour was done before the last prompt"
        assert neighbour.ids == neighbour_ids
        assert neighbour.finish.speculation.accepted > 50
        steps.check()
        assert behaviour.early == []
        assert drafter.record.problems == []
