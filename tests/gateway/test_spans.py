"""The gateway's spans: one a request, whole, in its caller's trace, and without a word of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from outrider.serving.errors import EngineFailed
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import gateway_on, gateway_with, target_status
from tests.support.otlp import Seen, Spans
from tests.support.scripted_target import Script, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "Pack my box"


async def span_of(
    folder: Path,
    request: pb.GenerateRequest,
    script: Script | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> tuple[Seen, Script]:
    """The one span of a request to a gateway."""
    spans, script = Spans(), script or Script([5] * 4, block=2)
    async with gateway_with(folder, script, tracing=spans.tracing("gateway")) as (gateway, _):
        call = gateway.stub.Generate(request, timeout=15, metadata=metadata)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
        await spans.wait(lambda: spans.all)
    (span,) = spans.all
    assert spans.num_started == 1
    return span, script


async def test_what_a_span_says(tiny_folder: Path) -> None:
    """Names and values of the conventions, of what was asked and of what came."""
    request = pb.GenerateRequest(
        request_id="mine",
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=SECRET)]),
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5, top_p=0.25, top_k=7, seed=11, presence_penalty=0.5
        ),
        stopping=sampling_pb2.StoppingParams(max_tokens=3, stop=[SECRET]),
    )
    span, _ = await span_of(tiny_folder, request)
    assert (span.name, span.kind, span.status) == ("chat tiny", "server", "unset")
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": "outrider.v1.Inference/Generate",
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.presence_penalty": 0.5,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 3,
        "outrider.request_id": "mine",
        "outrider.outcome": "finished",
        "outrider.seed": "11",
        "outrider.moves": 0,
        "outrider.drafted": 1,
        "outrider.accepted": 1,
        "outrider.rounds": 1,
    }
    assert expected.items() <= span.attributes.items()
    assert span.attributes["gen_ai.usage.input_tokens"] > 3
    assert 0 < span.attributes["outrider.time_to_first_token_s"] <= span.duration_s
    assert "error.type" not in span.attributes
    assert SECRET not in repr(span)


async def test_a_seed_that_does_not_fit_into_a_span(tiny_folder: Path) -> None:
    """Spans know signed integers only; one that is too large must not cost the whole batch."""
    sampling = sampling_pb2.SamplingParams(seed=2**64 - 1)
    span, _ = await span_of(tiny_folder, pb.GenerateRequest(text="x", sampling=sampling))
    assert span.attributes["outrider.seed"] == str(2**64 - 1)
    assert "gen_ai.request.seed" not in span.attributes


async def test_a_callers_trace_goes_on(tiny_folder: Path) -> None:
    """The span is the child of the caller's."""
    metadata = (("traceparent", TRACEPARENT),)
    span, _ = await span_of(tiny_folder, pb.GenerateRequest(text="x"), metadata=metadata)
    assert (span.trace_id, span.parent_span_id) == (TRACE, PARENT)


@pytest.mark.parametrize(
    "value", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
async def test_a_malformed_header_begins_a_new_trace(tiny_folder: Path, value: str) -> None:
    """As if there were none."""
    metadata = (("traceparent", value),)
    span, _ = await span_of(tiny_folder, pb.GenerateRequest(text="x"), metadata=metadata)
    assert span.trace_id != TRACE and span.parent_span_id == ""


async def test_names_of_spans_are_not_the_clients(tiny_folder: Path) -> None:
    """A model that nobody serves is an attribute, cut, and no name."""
    request = pb.GenerateRequest(text="x", model="y" * 10_000)
    span, _ = await span_of(tiny_folder, request)
    assert (span.name, span.status) == ("text_completion", "error")
    assert span.attributes["error.type"] == "not_found"
    assert span.attributes["gen_ai.request.model"] == "y" * 80


@pytest.mark.parametrize(
    ("request_", "script", "code", "outcome"),
    [
        (pb.GenerateRequest(), None, "invalid_argument", "refused"),
        (
            pb.GenerateRequest(text="x"),
            Script([5] * 9, fail_after=3, failure=EngineFailed("no luck")),
            "internal",
            "failed",
        ),
    ],
)
async def test_a_failed_request_has_a_span_with_an_error(
    tiny_folder: Path,
    request_: pb.GenerateRequest,
    script: Script | None,
    code: str,
    outcome: str,
) -> None:
    """Status, reason and code."""
    span, _ = await span_of(tiny_folder, request_, script)
    assert span.status == "error" and span.status_message
    assert (span.attributes["error.type"], span.attributes["outrider.outcome"]) == (code, outcome)
    assert span.attributes["rpc.response.status_code"] == code.upper()


async def test_a_cancelled_request_is_no_error(tiny_folder: Path) -> None:
    """Its span says that the client left, and covers the time until then."""
    spans = Spans()
    script = Script([5] * 200, delay_s=0.02)
    async with gateway_with(tiny_folder, script, tracing=spans.tracing("gateway")) as (g, _):
        call = g.stub.Generate(pb.GenerateRequest(text="x"))
        for _ in range(4):
            await call.read()
        call.cancel()
        await spans.wait(lambda: spans.all, 2)
    (span,) = spans.all
    assert span.status == "unset"
    assert span.attributes["error.type"] == span.attributes["outrider.outcome"] == "cancelled"
    assert span.duration_s >= 0.08
    assert span.attributes["gen_ai.usage.output_tokens"] >= 3


@pytest.mark.parametrize("traced", [True, False])
async def test_what_a_target_is_told(tiny_folder: Path, traced: bool) -> None:
    """The gateway's span as parent; where tracing is off, the client's context as it came."""
    spans = Spans()
    tracing = spans.tracing("gateway") if traced else None
    async with gateway_with(tiny_folder, Script([5]), tracing=tracing) as (gateway, target):
        metadata = (("traceparent", TRACEPARENT), ("tracestate", "a=b"))
        await gateway.stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata).read()
        await gateway.ask(pb.GenerateRequest(text="x"))
        first, second = target.seen.metadata
        if not traced:
            assert first["traceparent"] == TRACEPARENT and "traceparent" not in second
            return
        await spans.wait(lambda: len(spans.all) == 2)
        for span, seen in zip(spans.all, (first, second), strict=True):
            told = seen["traceparent"]
            assert told.startswith(f"00-{span.trace_id}-{span.span_id}-")
            assert int(told[-2:], 16) & 1  # sampled
        assert first["tracestate"] == "a=b"


async def test_what_is_not_sampled_has_no_span(tiny_folder: Path) -> None:
    """The caller says so, and the target hears it too."""
    spans = Spans()
    tracing = spans.tracing("gateway")
    async with gateway_with(tiny_folder, Script([5]), tracing=tracing) as (gateway, target):
        metadata = (("traceparent", TRACEPARENT[:-2] + "00"),)
        await gateway.stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata).read()
        await gateway.ask(pb.GenerateRequest(text="x"))
        await spans.wait(lambda: spans.all)
        assert target.seen.metadata[0]["traceparent"].endswith("-00")
        assert target.seen.metadata[0]["traceparent"].startswith(f"00-{TRACE}-")
    assert spans.num_started == len(spans.all) == 1


async def test_an_unread_stream_has_ended(tiny_folder: Path) -> None:
    """The span of a handler that is stuck in a write ends when its client leaves."""
    spans, status = Spans(), target_status(tiny_folder)
    status.max_model_len = 10**6
    async with (
        serving(Script([5] * 250 * 1000, block=250), status) as target,
        gateway_on(tiny_folder, [target.address], tracing=spans.tracing("gateway")) as gateway,
    ):
        await gateway.wait_health(True)
        call = gateway.stub.Generate(pb.GenerateRequest(text="x"))
        sent = -1
        while not target.seen.tokens_sent or target.seen.tokens_sent != sent:  # windows are full
            sent = target.seen.tokens_sent
            await asyncio.sleep(0.1)
        call.cancel()
        await spans.wait(lambda: spans.all, 2)
    (span,) = spans.all
    assert span.attributes["outrider.outcome"] == "cancelled"
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 250 * 1000
