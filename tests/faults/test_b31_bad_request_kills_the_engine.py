"""B31: one bad request kills the engine.

Symptom: a value that nobody checked is met inside the step loop, and everybody's request dies with
it. Right: each bad request is refused within a second by a message that names the field, the
streams beside it give what they give alone, and the next request works; a step that fails all the
same costs only the request for which it failed. Reported in public of several servers: an empty
prompt, a cap of 0, a stop id or a bias outside the vocabulary, each ended the whole engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.serving.channel import open_channel
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.bystanders import NUM_TOKENS, PROMPT, fail_steps_of, stream_beside
from tests.support.draft_stream import open_stream, run_draft_service
from tests.support.gateways import Gateway
from tests.support.in_process import Target, running_target
from tests.support.processes import is_serving
from tests.support.stacks import ask, full_stack
from tests.support.token_streams import fixed, greedy, slow_steps

pytestmark = pytest.mark.timeout(60)

Sampling = sampling_pb2.SamplingParams
Stopping = sampling_pb2.StoppingParams
Speculation = sampling_pb2.SpeculationParams

ANSWERED_WITHIN_S = 1.0
VOCAB_SIZE = 384
BIG = 10**6


def text(**fields: Any) -> pb.GenerateRequest:
    """A request for text that would be good without `fields`."""
    return pb.GenerateRequest(**({"text": "one river"} | fields))


def chat(*roles: str) -> pb.GenerateRequest:
    """A conversation of these roles."""
    messages = [pb.ChatMessage(role=role, content="x") for role in roles]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages))


def ids(*values: int) -> pb.GenerateRequest:
    """A prompt of ids."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values))


BAD_TEXT_REQUESTS = {
    "empty prompt": (text(text=""), "text"),
    "nothing at all": (pb.GenerateRequest(), "input"),
    "no messages": (chat(), "chat.messages"),
    "unknown role": (chat("wizard"), "chat.messages[0].role"),
    "no ids": (ids(), "token_ids.ids"),
    "id outside the vocabulary": (ids(5, VOCAB_SIZE), "token_ids.ids[1]"),
    "largest id": (ids(2**32 - 1), "token_ids.ids[0]"),
    "no tokens": (text(stopping=Stopping(max_tokens=0)), "stopping.max_tokens"),
    "bias outside the vocabulary": (
        text(sampling=Sampling(logit_bias={VOCAB_SIZE: 1})),
        "sampling.logit_bias",
    ),
    "bias of -1": (text(sampling=Sampling(logit_bias={2**32 - 1: 1})), "sampling.logit_bias"),
    "bias without a number": (
        text(sampling=Sampling(logit_bias={5: float("nan")})),
        "sampling.logit_bias[5]",
    ),
    "stop id outside the vocabulary": (
        text(stopping=Stopping(stop_token_ids=[BIG])),
        "stopping.stop_token_ids",
    ),
    "a million top log-probabilities": (text(logprobs=BIG), "logprobs"),
    "a million of the prompt": (text(prompt_logprobs=BIG), "prompt_logprobs"),
    "a thousand drafts": (
        text(speculation=Speculation(max_draft_tokens=1000)),
        "speculation.max_draft_tokens",
    ),
    "-1 drafts": (
        text(speculation=Speculation(max_draft_tokens=2**32 - 1)),
        "speculation.max_draft_tokens",
    ),
    "unknown mode": (text(speculation=Speculation(mode=77)), "speculation.mode"),
    "a million choices": (text(n=BIG), "n"),
    "infinite temperature": (
        text(sampling=Sampling(temperature=float("inf"))),
        "sampling.temperature",
    ),
}


def tokens(*prompt: int, **fields: Any) -> target_pb2.TokenRequest:
    """A request to the target that would be good without `fields`."""
    good = {"sampling": Sampling(temperature=0), "stopping": Stopping(max_tokens=4)}
    return target_pb2.TokenRequest(token_ids=prompt or [5, 6], **(good | fields))


BAD_TOKEN_REQUESTS = {
    "no ids": (target_pb2.TokenRequest(sampling=Sampling(temperature=0)), "token_ids"),
    "id outside the vocabulary": (tokens(5, VOCAB_SIZE), "token_ids"),
    "resumed id outside the vocabulary": (
        tokens(resumed_token_ids=[VOCAB_SIZE]),
        "resumed_token_ids",
    ),
    "longer than the context": (tokens(*[5] * 600), "token_ids"),
    "no tokens": (tokens(stopping=Stopping(max_tokens=0)), "stopping.max_tokens"),
    "no seed": (tokens(sampling=Sampling(temperature=1)), "sampling.seed"),
    "bias outside the vocabulary": (
        tokens(sampling=Sampling(temperature=0, logit_bias={BIG: 1})),
        "sampling.logit_bias",
    ),
    "stop id outside the vocabulary": (
        tokens(stopping=Stopping(stop_token_ids=[BIG])),
        "stopping.stop_token_ids",
    ),
    "a stop string": (tokens(stopping=Stopping(stop=["x"])), "stopping.stop"),
    "a million top log-probabilities": (tokens(logprobs=BIG), "logprobs"),
    "a thousand drafts": (
        tokens(speculation=fixed(1000)),
        "speculation.max_draft_tokens",
    ),
    "a million choices": (tokens(n=BIG), "n"),
    "priority": (tokens(priority=BIG), "priority"),
}


async def refusal_of(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    """The error that a call ends with, which must come at once and before any answer."""
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            raise AssertionError("a bad request was answered")
    assert time.monotonic() - started < ANSWERED_WITHIN_S
    return caught.value


@contextlib.asynccontextmanager
async def busy_stack(model: Path) -> AsyncIterator[tuple[Gateway, Target]]:
    """All three services, slow enough that everything in the block happens beside a stream."""
    async with full_stack(model) as (gateway, target):
        alone = await target.ids(greedy(PROMPT, NUM_TOKENS))
        slow_steps(target, 0.01)
        async with stream_beside(target, alone):
            yield gateway, target
        status = await target.status()
        assert status.load.failed == 0
        assert status.state == "serving"


async def check_odd_requests(gateway: Gateway, target: Target) -> None:
    """A prompt of one token; 0 drafts, which are none; a cap of 2**32 - 1, which is what becomes of
    -1 and ends with the context."""
    assert len(await target.ids(greedy([5], 5))) == 5
    no_drafts = Speculation(max_draft_tokens=0)
    answer = await target.answer(greedy([5, 6], 5, no_drafts))
    assert answer.finish.speculation.drafted == 0
    assert answer.ids == await target.ids(greedy([5, 6], 5))
    capped = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5] * 500),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=2**32 - 1, ignore_eos=True),
    )
    capped_answer = await gateway.ask(capped)
    assert capped_answer.reason == "LENGTH"
    assert len(capped_answer.ids) == 12


async def test_bad_and_odd_requests_hurt_nobody_else(tiny_model: Path) -> None:
    """INVALID_ARGUMENT that names the field for each, while a stream of 300 tokens runs; the target
    checks for itself, whatever a gateway lets through; what is odd but good is answered."""
    async with busy_stack(tiny_model) as (gateway, target):
        for service, requests in ((gateway, BAD_TEXT_REQUESTS), (target, BAD_TOKEN_REQUESTS)):
            for name, (request, field) in requests.items():
                error = await refusal_of(service.stub.Generate(request, timeout=10))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
                assert field in error.details(), name
        assert len((await ask(gateway, "one river", 0, max_tokens=5)).ids) == 5
        await check_odd_requests(gateway, target)


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes([number << 3 | 2, len(payload)]) + payload


NO_MESSAGES = {
    "invalid UTF-8": _field(pb.GenerateRequest.TEXT_FIELD_NUMBER, b"\xff\xfe"),
    "a lone surrogate": _field(pb.GenerateRequest.TEXT_FIELD_NUMBER, b"\xed\xa0\x80"),
    "cut off": b"\x0a\x7f",
    "noise": bytes(range(255, 200, -1)),
}


@pytest.mark.parametrize("name", NO_MESSAGES)
async def test_bytes_that_are_no_request_are_the_clients_fault(name: str, tiny_model: Path) -> None:
    """INVALID_ARGUMENT, not an internal error, and the service goes on."""
    async with full_stack(tiny_model) as (gateway, _), open_channel(gateway.address) as channel:
        method = "/outrider.v1.Inference/Generate"
        error = await refusal_of(channel.unary_stream(method)(NO_MESSAGES[name], timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "GenerateRequest" in error.details()
        assert len((await ask(gateway, "one river", 0, max_tokens=5)).ids) == 5


async def test_bytes_that_are_no_frame_end_their_stream_only() -> None:
    """The draft service names the fault of the one target, and shakes hands with the next."""
    async with (
        run_draft_service(DraftSettings(port=0)) as draft,
        open_channel(draft.address) as channel,
        open_stream(draft.address),
    ):
        raw = channel.stream_stream("/outrider.v1.Draft/Speculate")
        call = raw(iter([NO_MESSAGES["cut off"]]), timeout=10)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "SpeculateRequest" in await call.details()
        async with open_stream(draft.address) as stream:
            assert stream.hello.instance_id
        assert (await draft.status()).streams == 1


async def test_a_step_that_fails_for_one_request_fails_only_that_one(tiny_model: Path) -> None:
    """Ten such requests, five at once and five in a row, each ended with INTERNAL; the
    stream beside them and the service's health do not notice."""
    async with running_target(tiny_model) as target, open_channel(target.address) as channel:
        alone = await target.ids(greedy(PROMPT, NUM_TOKENS))
        slow_steps(target, 0.01)
        fail_steps_of(target, lambda name: name.startswith("poison"))
        # The lines of the log would be rendered at length, on the event loop.
        with capture_logs():
            async with stream_beside(target, alone):
                poisoned = [tokens(request_id=f"poison-{i}") for i in range(10)]
                calls = [target.stub.Generate(each, timeout=10) for each in poisoned[:5]]
                errors = list(await asyncio.gather(*(refusal_of(call) for call in calls)))
                for each in poisoned[5:]:
                    errors.append(await refusal_of(target.stub.Generate(each, timeout=10)))
                assert all(error.code() is grpc.StatusCode.INTERNAL for error in errors)
                assert all("poisoned" in error.details() for error in errors)
                assert await is_serving(channel)
        assert (await target.status()).load.failed == 10
