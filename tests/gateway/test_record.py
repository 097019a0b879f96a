"""One log line a request, however it ends, and without a word of it unless that is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.service import GatewayService
from gateway.tokenizer import ModelTokenizer
from outrider.serving.channel import open_channel
from outrider.serving.errors import EngineFailed, Unavailable
from outrider.serving.server import listening
from outrider.serving.settings import GatewaySettings
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Gateway, gateway_with, target_status, until
from tests.support.otlp import Spans
from tests.support.scripted_target import Script, serving

SECRET = "Pack my box with five dozen liquor jugs."
ANSWER = "The quick brown fox"
Lines = list[MutableMapping[str, Any]]


def requests_in(lines: Lines) -> Lines:
    """The canonical lines."""
    return [line for line in lines if line["event"] == "request"]


async def test_a_finished_request_says_what_it_was(tiny_folder: Path) -> None:
    """Its name, its target, its counts and its times, on one line."""
    ids = ModelTokenizer.load(tiny_folder).encode(ANSWER)
    sampling = sampling_pb2.SamplingParams(seed=2**64 - 1)
    request = pb.GenerateRequest(request_id="mine", text=SECRET, sampling=sampling)
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script(ids, block=3)) as (gateway, target):
            finish = (await gateway.ask(request)).finish
            await until(lambda: bool(requests_in(lines)))
    (line,) = requests_in(lines)
    assert line["outcome"] == "finished" and "code" not in line
    assert (line["request_id"], line["seed"], line["choices"]) == ("mine", 2**64 - 1, 1)
    assert (line["target"], line["moves"]) == (target.address, 0)
    assert line["prompt_tokens"] == finish.usage.prompt_tokens
    assert line["completion_tokens"] == finish.usage.completion_tokens == len(ids)
    assert (line["withheld_tokens"], line["finish_reasons"]) == (0, ["length"])
    assert (line["rounds"], line["drafted"], line["accepted"]) == (
        finish.speculation.rounds, finish.speculation.drafted, finish.speculation.accepted
    )  # fmt: skip
    assert line["accepted"] > 0
    assert 0 <= line["time_to_first_token_s"] <= line["duration_s"]
    assert "trace_id" not in line


@pytest.mark.parametrize(
    ("script", "outcome", "code"),
    [
        (Script([5] * 9, fail_after=4, failure=EngineFailed("no luck")), "failed", "internal"),
        (Script([5] * 9, refuse=Unavailable("draining")), "failed", "unavailable"),
        (Script([5] * 9, hang_after=4), "failed", "deadline_exceeded"),
    ],
)
async def test_a_failed_request_says_why(
    tiny_folder: Path, script: Script, outcome: str, code: str
) -> None:
    """Code and reason; what had been done by then is counted."""
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, script) as (gateway, _):
            with pytest.raises(grpc.aio.AioRpcError):
                await gateway.ask(pb.GenerateRequest(text=SECRET), timeout_s=0.5)
            await until(lambda: bool(requests_in(lines)))
    (line,) = requests_in(lines)
    assert (line["outcome"], line["code"]) == (outcome, code)
    assert line["error"]
    assert line["completion_tokens"] == (0 if script.refuse else 4)
    assert line["finish_reasons"] == []


@pytest.mark.parametrize("num_read", [0, 2])
async def test_a_cancelled_request(tiny_folder: Path, num_read: int) -> None:
    """One line, and it says that the client left."""
    script = Script([5] * 200, delay_s=0.01)
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, script) as (gateway, target):
            call = gateway.stub.Generate(pb.GenerateRequest(text=SECRET))
            await until(lambda: target.seen.running == 1)
            for _ in range(num_read):
                await call.read()
            call.cancel()
            await until(lambda: bool(requests_in(lines)))
    (line,) = requests_in(lines)
    assert (line["outcome"], line["code"]) == ("cancelled", "cancelled")


REFUSED = {
    "field": pb.GenerateRequest(
        text=SECRET, request_id="x", sampling=sampling_pb2.SamplingParams(top_p=7)
    ),
    "role": pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role=SECRET, content="x")]), request_id="x"
    ),
    "model": pb.GenerateRequest(text=SECRET, model=SECRET, request_id="x"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_request_has_a_line_too(tiny_folder: Path, name: str) -> None:
    """With the client's name for it, the field's name, and nothing that the client has written."""
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script([5])) as (gateway, _):
            with pytest.raises(grpc.aio.AioRpcError):
                await gateway.ask(REFUSED[name])
            await until(lambda: bool(requests_in(lines)))
    (line,) = requests_in(lines)
    assert (line["outcome"], line["request_id"]) == ("refused", "x")
    assert line["code"] == ("not_found" if name == "model" else "invalid_argument")
    assert SECRET not in json.dumps(lines, default=str)


async def test_bytes_that_are_no_request_have_a_line_too(tiny_folder: Path) -> None:
    """They never become a request."""
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script([5])) as (gateway, _):
            call = gateway.channel.unary_stream("/outrider.v1.Inference/Generate")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff\xff\xff").read()
            await until(lambda: bool(requests_in(lines)))
    (line,) = requests_in(lines)
    assert (line["outcome"], line["code"]) == ("refused", "invalid_argument")


@pytest.mark.parametrize("log_text", [False, True])
async def test_text_is_logged_only_where_that_is_asked_for(
    tiny_folder: Path, log_text: bool
) -> None:
    """Neither prompts nor answers, of texts and of chats; with the setting, both."""
    ids = ModelTokenizer.load(tiny_folder).encode(ANSWER)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=SECRET)])
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script(ids, block=3), log_text=log_text) as (g, _):
            await g.ask(pb.GenerateRequest(text=SECRET))
            await g.ask(pb.GenerateRequest(chat=chat))
            await until(lambda: len(requests_in(lines)) == 2)
    everything = json.dumps(lines, default=str)
    assert (SECRET in everything) == (ANSWER in everything) == log_text
    if log_text:
        text, conversation = requests_in(lines)
        assert text["prompt"] == SECRET and text["texts"] == [ANSWER]
        assert conversation["prompt"] == (("user", SECRET),)


async def test_a_line_leads_to_its_trace(tiny_folder: Path) -> None:
    """The same ids as the span's."""
    spans = Spans()
    with capture_logs() as lines:
        tracing = spans.tracing("gateway")
        async with gateway_with(tiny_folder, Script([5]), tracing=tracing) as (gateway, _):
            await gateway.ask(pb.GenerateRequest(text="x"))
            await spans.wait(lambda: spans.of("gateway"))
    (span,), (line,) = spans.of("gateway"), requests_in(lines)
    assert (line["trace_id"], line["span_id"]) == (span.trace_id, span.span_id)


async def test_a_fault_of_the_telemetry_fails_no_request(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks in logs, spans and metrics: clients get their answers, and it is counted."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    for name in ("start", "describe", "end"):
        monkeypatch.setattr(f"gateway.spans.{name}", broken)
    monkeypatch.setattr("gateway.record.to_metadata", broken)
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script([5] * 3)) as (gateway, _):
            metrics = gateway.service._metrics
            monkeypatch.setattr(metrics.time_to_first_token, "observe", broken)
            monkeypatch.setattr(metrics.request_duration, "observe", broken)
            answers = await asyncio.gather(
                *(gateway.ask(pb.GenerateRequest(text="x")) for _ in range(3))
            )
            await until(lambda: metrics.totals.running == 0)
            assert metrics.faults.count == 3 * 6
            assert metrics.totals.delivered_tokens == 9
    assert [answer.ids for answer in answers] == [[5] * 3] * 3
    said = [line["where"] for line in lines if line["event"] == "telemetry failed"]
    assert len(said) == len(set(said))
    assert len(requests_in(lines)) == 3


async def test_a_request_that_the_shutdown_ends_has_failed(tiny_folder: Path) -> None:
    """Its client has not left: it is told UNAVAILABLE, and the line says so too."""
    with capture_logs() as lines:
        async with serving(Script([5] * 9, hang_after=2), target_status(tiny_folder)) as target:
            settings = GatewaySettings(model=str(tiny_folder), targets=target.address, http_port=-1)
            service = GatewayService(settings)
            async with (
                listening(service, "127.0.0.1", 0) as running,
                open_channel(f"127.0.0.1:{running.port}") as channel,
            ):
                gateway = Gateway("", channel, service)
                await gateway.wait_health(True)
                asking = asyncio.create_task(gateway.ask(pb.GenerateRequest(text="x")))
                await until(lambda: service._metrics.totals.delivered_tokens == 2)
                await service.drain()
                assert await running.calls.drain(0.01) == 1
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asking
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    (line,) = requests_in(lines)
    assert (line["outcome"], line["code"]) == ("failed", "unavailable")
    assert line["error"] == "the service is shutting down"
