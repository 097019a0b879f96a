"""What the gateway refuses: the status, and the field that is named in the details."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.serving.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import MAX_MODEL_LEN, VOCAB_SIZE, Gateway, gateway_on, gateway_with
from tests.support.scripted_target import Script, ScriptedTarget

Sampling = sampling_pb2.SamplingParams
Stopping = sampling_pb2.StoppingParams
Speculation = sampling_pb2.SpeculationParams


@pytest.fixture
async def served(tiny_folder: Path) -> AsyncIterator[tuple[Gateway, ScriptedTarget]]:
    """A ready gateway that takes 1,000 bytes of prompt."""
    script = Script([5, 6, 7])
    async with gateway_with(tiny_folder, script, max_prompt_bytes=1000) as both:
        yield both


def violated_field(error: grpc.aio.AioRpcError) -> str:
    """The field that the BadRequest detail names."""
    detail = error_details_pb2.BadRequest()
    assert rpc_status.from_call(error).details[0].Unpack(detail)
    return detail.field_violations[0].field


def chat(*turns: tuple[str, str]) -> pb.Chat:
    """A conversation."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in turns])


def ids(*values: int) -> pb.TokenIds:
    """A prompt of ids."""
    return pb.TokenIds(ids=values)


INVALID = {
    "no input": (pb.GenerateRequest(), "input"),
    "empty text": (pb.GenerateRequest(text=""), "text"),
    "long text": (pb.GenerateRequest(text="x" * 1001), "text"),
    "long text in bytes": (pb.GenerateRequest(text="\u2603" * 334), "text"),
    "empty ids": (pb.GenerateRequest(token_ids=ids()), "token_ids.ids"),
    "unknown id": (pb.GenerateRequest(token_ids=ids(1, VOCAB_SIZE)), "token_ids.ids[1]"),
    "full context": (pb.GenerateRequest(token_ids=ids(*[5] * MAX_MODEL_LEN)), "token_ids.ids"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    "unknown role": (
        pb.GenerateRequest(chat=chat(("user", "x"), ("wizard", "y"))),
        "chat.messages[1].role",
    ),
    "long chat": (pb.GenerateRequest(chat=chat(("user", "x" * 1001))), "chat.messages"),
    "many messages": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)),
        "chat.messages",
    ),
    "n": (pb.GenerateRequest(text="x", n=17), "n"),
    "n 0": (pb.GenerateRequest(text="x", n=0), "n"),
    "logprobs": (pb.GenerateRequest(text="x", logprobs=21), "logprobs"),
    "prompt_logprobs": (pb.GenerateRequest(text="x", prompt_logprobs=21), "prompt_logprobs"),
    "verification": (
        pb.GenerateRequest(text="x", speculation=Speculation(verification=9)),
        "speculation.verification",
    ),
    "drafts": (
        pb.GenerateRequest(text="x", speculation=Speculation(max_draft_tokens=9)),
        "speculation.max_draft_tokens",
    ),
    "priority": (pb.GenerateRequest(text="x", priority=101), "priority"),
    "request id": (pb.GenerateRequest(text="x", request_id="\u2603" * 43), "request_id"),
    "temperature": (
        pb.GenerateRequest(text="x", sampling=Sampling(temperature=-1)),
        "sampling.temperature",
    ),
    "nan": (
        pb.GenerateRequest(text="x", sampling=Sampling(temperature=float("nan"))),
        "sampling.temperature",
    ),
    "top_p": (pb.GenerateRequest(text="x", sampling=Sampling(top_p=0)), "sampling.top_p"),
    "bias": (
        pb.GenerateRequest(text="x", sampling=Sampling(logit_bias={VOCAB_SIZE: 1})),
        "sampling.logit_bias",
    ),
    "max_tokens": (
        pb.GenerateRequest(text="x", stopping=Stopping(max_tokens=0)),
        "stopping.max_tokens",
    ),
    "min over max": (
        pb.GenerateRequest(text="x", stopping=Stopping(max_tokens=2, min_tokens=3)),
        "stopping.min_tokens",
    ),
    "min over room": (
        pb.GenerateRequest(text="x", stopping=Stopping(min_tokens=MAX_MODEL_LEN)),
        "stopping.min_tokens",
    ),
    "17 stops": (
        pb.GenerateRequest(text="x", stopping=Stopping(stop=["a"] * 17)),
        "stopping.stop",
    ),
    "empty stop": (
        pb.GenerateRequest(text="x", stopping=Stopping(stop=["a", ""])),
        "stopping.stop",
    ),
    "stop id": (
        pb.GenerateRequest(text="x", stopping=Stopping(stop_token_ids=[VOCAB_SIZE])),
        "stopping.stop_token_ids[0]",
    ),
}


@pytest.mark.parametrize("name", INVALID)
async def test_invalid_requests(served: tuple[Gateway, ScriptedTarget], name: str) -> None:
    """INVALID_ARGUMENT names the field, in the message too, and no target is asked."""
    gateway, target = served
    request, field = INVALID[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.ask(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == field
    assert field in caught.value.details()
    assert not target.seen.requests


async def test_full_context_says_both_numbers(served: tuple[Gateway, ScriptedTarget]) -> None:
    """Who sent too long a prompt learns its length and the limit."""
    gateway, _ = served
    with pytest.raises(grpc.aio.AioRpcError, match=r"300 tokens.*context of 256"):
        await gateway.ask(pb.GenerateRequest(token_ids=ids(*[5] * 300)))


async def test_unknown_model(served: tuple[Gateway, ScriptedTarget]) -> None:
    """NOT_FOUND from every method that takes a model; the served name works."""
    gateway, _ = served
    calls = [
        gateway.ask(pb.GenerateRequest(text="x", model="other")),
        gateway.stub.Tokenize(pb.TokenizeRequest(text="x", model="other")),
        gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[5], model="other")),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "other" in caught.value.details()
    assert (await gateway.ask(pb.GenerateRequest(text="x", model="tiny"))).ids == [5, 6, 7]


async def test_max_tokens_is_capped_to_the_room(served: tuple[Gateway, ScriptedTarget]) -> None:
    """Unset and too large mean the room left in the context; at least one token must fit."""
    gateway, target = served
    prompt = ids(*[5] * (MAX_MODEL_LEN - 2))
    await gateway.ask(pb.GenerateRequest(token_ids=prompt))
    await gateway.ask(pb.GenerateRequest(token_ids=prompt, stopping=Stopping(max_tokens=50)))
    await gateway.ask(pb.GenerateRequest(token_ids=prompt, stopping=Stopping(max_tokens=1)))
    last = ids(*[5] * (MAX_MODEL_LEN - 1))
    answer = await gateway.ask(pb.GenerateRequest(token_ids=last))
    assert [request.stopping.max_tokens for request in target.seen.requests] == [2, 2, 1, 1]
    assert answer.reason == "LENGTH" and len(answer.ids) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("sampling.top_k", "too odd"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("the line is full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("draining"), grpc.StatusCode.UNAVAILABLE),
        (EngineFailed("step failed"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_the_targets_refusal_passes_through(
    tiny_folder: Path, error: Exception, code: grpc.StatusCode
) -> None:
    """Code, message and details of a target's refusal reach the client."""
    async with gateway_with(tiny_folder, Script(refuse=error)) as (gateway, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ask(pb.GenerateRequest(text="x"))
    assert caught.value.code() is code
    assert str(error) in caught.value.details()
    if isinstance(error, Overloaded):
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 2500
    if isinstance(error, InvalidRequest):
        assert violated_field(caught.value) == "sampling.top_k"


async def test_no_target(tiny_folder: Path) -> None:
    """Without a target: NOT_SERVING, not ready, UNAVAILABLE with the reason; tokenizing works."""
    async with gateway_on(tiny_folder, ["127.0.0.1:1"]) as gateway:
        await gateway.wait_health(False)
        models = (await gateway.stub.ListModels(pb.ListModelsRequest())).models
        assert [(model.name, model.ready) for model in models] == [("tiny", False)]
        with pytest.raises(grpc.aio.AioRpcError, match=r"127\.0\.0\.1:1") as caught:
            await gateway.ask(pb.GenerateRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await gateway.stub.Tokenize(pb.TokenizeRequest(text="END"))).ids
