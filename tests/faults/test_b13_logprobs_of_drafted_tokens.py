"""B13. Log-probabilities of drafted tokens that are zero, missing, or those of a neighbour.

Symptom: every accepted draft is reported as certain, or only the first token of a round has the
right value, or the values are shifted by a position.

Right: one entry for each token, in order, whether it was accepted, recovered or a bonus: the raw
log-softmax of the model at its position, the same with drafts as without, with as many
alternatives as were asked for. The same holds for the prompt's tokens, however the prompt was cut
into chunks and whatever the prefix cache holds.

Reported to llama.cpp (27972: every token certain) and vLLM (17876, 34497: zero or shifted).
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from protos.outrider.v1 import inference_pb2, sampling_pb2, target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, Perfect, Wrong
from tests.support.gateways import gateway_on
from tests.support.in_process import Answer, running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
NUM_TOKENS = 40
NUM_TOP = 5
(PROMPT,) = random_prompts([37], VOCAB_SIZE)
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "top_k": 20, "repetition_penalty": 1.3},
}


@functools.cache
def runner_for(model: Path, dtype: str) -> Runner:
    """The model by itself."""
    return Runner(LlamaModel.load(model, dtype), num_blocks=32)


def reference_logprobs(model: Path, ids: list[int]) -> torch.Tensor:
    """Row i: log-probabilities of what follows ids[: i + 1], from one pass over all of them."""
    item = BatchItem(ids, 0, list(range(32)), len(ids))
    return torch.log_softmax(
        runner_for(model, chosen_dtype()).forward(Batch([item])).double(), dim=-1
    )


def check_tokens(tokens: list, rows: torch.Tensor) -> None:
    """Every token has the value and the alternatives of its row."""
    assert len(tokens) == len(rows)
    for token, row in zip(tokens, rows, strict=True):
        assert token.HasField("logprob")
        assert abs(token.logprob - float(row[token.id])) < 1e-3
        best = row.sort(descending=True, stable=True)  # of equal ones the lowest id first
        assert [each.id for each in token.top] == best.indices[:NUM_TOP].tolist()
        for each, value in zip(token.top, best.values.tolist(), strict=False):
            assert abs(each.logprob - value) < 1e-3


def request_with(settings: dict, k: int, *stops: int) -> target_pb2.TokenRequest:
    """Forty tokens with their log-probabilities."""
    request = make_request(PROMPT, NUM_TOKENS, k=k, stop_token_ids=stops, **settings)
    request.logprobs = NUM_TOP
    return request


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_every_token_has_its_own_logprob(tiny_model: Path, settings: dict) -> None:
    """Accepted, recovered and bonus tokens: equal to OFF bit for bit, and right; also where a stop
    token lies inside a block."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await target.answer(request_with(settings, 0))
        rows = reference_logprobs(tiny_model, PROMPT + off.ids)[len(PROMPT) - 1 : -1]
        check_tokens(off.tokens, rows)
        plain = await target.answer(make_request(PROMPT, NUM_TOKENS, **settings))
        assert plain.ids == off.ids
        assert not any(token.HasField("logprob") or token.top for token in plain.tokens)
        known = {tuple(PROMPT): off.ids}
        for source, some in (
            (Perfect(known), True),
            (Partial(known, 2, VOCAB_SIZE), True),
            (Wrong(known, VOCAB_SIZE), False),
        ):
            drafter.behaviour = Drafting(source)
            for stops in ((), (off.ids[17],)):
                on = await target.answer(request_with(settings, 4, *stops))
                assert values_of(on) == values_of(off)[: len(on.tokens)]
                assert any(token.drafted for token in on.tokens) == some
                expected = off.ids.index(off.ids[17]) + 1 if stops else NUM_TOKENS
                assert len(on.tokens) == expected


def values_of(answer: Answer) -> list:
    """Ids, values and alternatives, without who proposed them."""
    return [
        (token.id, token.logprob, [(each.id, each.logprob) for each in token.top])
        for token in answer.tokens
    ]


@pytest.mark.parametrize("step_tokens", [512, 16], ids=["whole", "chunks"])
async def test_every_prompt_token_has_its_own_logprob(tiny_model: Path, step_tokens: int) -> None:
    """Each once, in order, also when the prefix cache holds the prompt; none for the first one."""
    async with running_target(tiny_model, step_tokens=step_tokens, max_sequences=8) as target:
        rows = reference_logprobs(tiny_model, PROMPT)[:-1]
        request = make_request(PROMPT, 4)
        plain = await target.answer(request)
        request.prompt_logprobs = NUM_TOP
        for _ in range(2):
            answer = await target.answer(request)
            assert answer.ids == plain.ids
            assert [token.id for token in answer.prompt_tokens] == PROMPT
            first, *others = answer.prompt_tokens
            assert not first.HasField("logprob")
            check_tokens(others, rows)
            assert answer.finish.usage.cached_prompt_tokens == 0
        assert (await target.answer(make_request(PROMPT[:1], 1))).prompt_tokens == []


async def test_prompt_logprobs_survive_a_preemption(tiny_model: Path) -> None:
    """A prompt whose blocks were taken midway: each token is still told once."""
    prompts = random_prompts([60, 61, 62, 63], VOCAB_SIZE, seed=3)
    async with running_target(tiny_model, kv_tokens=192, step_tokens=32, max_sequences=4) as target:
        requests = [make_request(prompt, 60) for prompt in prompts]
        for request in requests:
            request.prompt_logprobs = NUM_TOP
        answers = await answer_all(target, requests)
        assert (await target.status()).load.preemptions > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert [token.id for token in answer.prompt_tokens] == prompt
            check_tokens(answer.prompt_tokens[1:], reference_logprobs(tiny_model, prompt)[:-1])


async def test_logprobs_reach_the_client(tiny_model: Path) -> None:
    """Through the gateway they arrive as the target made them."""
    async with (
        running_target(tiny_model) as target,
        gateway_on(tiny_model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        request = request_with({}, 0)
        request.prompt_logprobs = NUM_TOP
        direct = await target.answer(request)
        prompt_tokens: list[sampling_pb2.PromptToken] = []
        tokens: list[sampling_pb2.GeneratedToken] = []
        async for response in gateway.stub.Generate(
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                sampling=request.sampling,
                stopping=request.stopping,
                logprobs=NUM_TOP,
                prompt_logprobs=NUM_TOP,
            ),
            timeout=20,
        ):
            prompt_tokens += response.chunk.prompt_tokens
            tokens += response.chunk.tokens
        assert prompt_tokens == direct.prompt_tokens
        assert tokens == direct.tokens
