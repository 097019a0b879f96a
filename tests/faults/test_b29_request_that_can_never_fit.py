"""B29. A request that can never fit blocks the line behind it.

Symptom: a prompt that fits the model's context but not the pool of blocks waits for ever, and
everything behind it too: one waits, none runs, and the health check is fine.

Right: what can never fit is refused within a second, with the limit in the message; what comes
behind it runs. The longest sequence is the smaller one of context and pool, and an answer that
reaches its end finishes with "length". A huge cap reserves nothing. A draft whose own pool is too
small for a sequence means no drafts for it, and never a refusal.

Reported to vLLM: a prompt that fits the context, but not the pool, blocks all behind it (39734);
caps above what is left of the context (42474, 33418); a stuck engine that looks healthy (45414).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.draft_stream import run_draft_service
from tests.support.gateways import Gateway, gateway_on
from tests.support.in_process import Answer, Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

CONTEXT = 8192
POOL = 1024
REFUSED_S = 1.0
Speculation = sampling_pb2.SpeculationParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context far longer than the pool; one layer, as the prompts are long."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=CONTEXT, layers=1)


@pytest.fixture
async def target(model: Path) -> AsyncIterator[Target]:
    """A target with a small pool and no drafter."""
    async with running_target(model, kv_tokens=POOL) as target:
        yield target


def prompt(length: int) -> list[int]:
    """A prompt of that many tokens."""
    (ids,) = random_prompts([length], 300, seed=length)
    return ids


async def refusal(target: Target, request: target_pb2.TokenRequest) -> str:
    """What the target says of a request that it refuses within a second."""
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.answer(request)
    assert time.monotonic() - started < REFUSED_S
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details()


def is_length(answer: Answer) -> bool:
    """It ended because it may not be longer."""
    return answer.finish.reason == sampling_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("length", [1024, 1025, 2000, 9000])
async def test_a_prompt_that_cannot_fit_is_refused(target: Target, length: int) -> None:
    """Longer than the pool or than the context: refused, and the short one behind it is served."""
    refused, short = await asyncio.gather(
        refusal(target, make_request(prompt(length), 10)),
        target.answer(make_request(prompt(10), 10)),
    )
    assert f"{length}" in refused
    assert f"{POOL}" in refused
    assert len(short.ids) == 10
    status = await target.status()
    assert status.max_model_len == POOL
    assert status.load.waiting == status.load.running == status.load.failed == 0


async def test_a_prompt_that_leaves_one_place(target: Target) -> None:
    """One token below the limit: one token, and "length"."""
    answer = await target.answer(make_request(prompt(POOL - 1), 10))
    assert len(answer.ids) == 1
    assert is_length(answer)


@pytest.mark.parametrize("cap", [600, 2**32 - 1])
async def test_a_cap_beyond_the_pool_is_length_at_its_end(target: Target, cap: int) -> None:
    """The cap is the caller's hope; the pool's end is a fact."""
    answer = await target.answer(make_request(prompt(600), cap))
    assert len(answer.ids) == POOL - 600
    assert is_length(answer)


async def test_no_cap_ends_at_the_pools_end(target: Target) -> None:
    """A request without a cap is one with the largest."""
    request = make_request(prompt(900), 1)
    request.stopping.ClearField("max_tokens")
    answer = await target.answer(request)
    assert len(answer.ids) == POOL - 900
    assert is_length(answer)


async def test_huge_caps_reserve_nothing(target: Target) -> None:
    """Ten requests with caps of 10^9 run at once in a pool for one of them; each stops early."""
    (first,) = await target.ids(make_request(prompt(30), 1))
    requests = [make_request(prompt(30), 10**9, stop_token_ids=[first]) for _ in range(10)]
    answers = await answer_all(target, requests, 10)
    assert all(answer.ids == [first] for answer in answers)
    assert (await target.status()).load.preemptions == 0


@pytest.mark.parametrize("cap", [2**63 - 1, 2**32, -1])
def test_caps_outside_32_bits_cannot_be_sent(cap: int) -> None:
    """The field is a uint32: the client's own library refuses them before anything is sent."""
    with pytest.raises(ValueError, match="(?i)range"):
        make_request([5], cap)


async def test_two_that_fit_only_one_after_the_other(target: Target) -> None:
    """Each nearly fills the pool: both are served whole, and those behind them too."""
    requests = [make_request(prompt(length), 60) for length in (800, 700, 20, 10)]
    solo = [await target.ids(request) for request in requests]
    answers = await answer_all(target, requests, 30)
    assert [answer.ids for answer in answers] == solo
    assert [len(answer.ids) for answer in answers] == [60] * 4


async def ask(gateway: Gateway, length: int, cap: int | None) -> object:
    """A greedy answer through the gateway."""
    stopping = sampling_pb2.StoppingParams(max_tokens=cap, ignore_eos=True)
    return await gateway.ask(
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt(length)),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=stopping,
        )
    )


async def test_the_same_through_the_gateway(model: Path, target: Target) -> None:
    """It knows the target's limit: refused within a second, and "length" at the pool's end."""
    async with gateway_on(model, [target.address]) as gateway:
        await gateway.wait_health(True)
        for length in (1024, 2000, 9000):
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError, match=f"{POOL}") as caught:
                await ask(gateway, length, 10)
            assert time.monotonic() - started < REFUSED_S
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for cap in (10**9, None):
            answer = await ask(gateway, 800, cap)
            assert (len(answer.ids), answer.reason) == (POOL - 800, "LENGTH")
        assert len((await ask(gateway, 10, 10)).ids) == 10


@pytest.mark.parametrize("draft_pool", [64, 256])
async def test_a_small_pool_of_the_draft_means_no_drafts(model: Path, draft_pool: int) -> None:
    """The target's own weights as draft, with room for little: long sequences go on without drafts,
    short ones have them, and none is refused or held up."""
    settings = DraftSettings(
        port=0, proposer="model", model=str(model), dtype=chosen_dtype(), kv_tokens=draft_pool
    )
    async with (
        run_draft_service(settings) as drafter,
        running_target(model, drafters=drafter.address, kv_tokens=POOL) as target,
    ):
        await wait_for_drafters(target)
        lengths = [600, draft_pool, draft_pool - 1, 10]
        off = [await target.ids(make_request(prompt(n), 40)) for n in lengths]
        requests = [make_request(prompt(n), 40, k=4) for n in lengths]
        started = time.monotonic()
        alone = [await target.answer(request) for request in requests]
        assert time.monotonic() - started < 8
        assert [answer.ids for answer in alone] == off
        assert [answer.speculation.drafted > 0 for answer in alone] == [False, False, False, True]
        together = await answer_all(target, requests, 15)
        assert [answer.ids for answer in together] == off
        assert together[3].speculation.drafted > 0
        assert (await target.status()).load.refused == 0
        status = await drafter.wait_until(lambda status: status.load.sessions == 0)
        assert status.pool.used == 0
        assert list(status.pool.integrity_errors) == []
