"""A target's spans and log lines, one set a request, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import draft_pb2, target_pb2_grpc
from tests.support.draft_scripts import Drafting, Perfect
from tests.support.in_process import Target, running_target
from tests.support.otlp import Seen, Spans
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, wait_for_drafters
from tests.support.token_streams import quiet_status, slow_steps

pytestmark = pytest.mark.timeout(90)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDED_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough that nothing ends by itself."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=4096)


@contextlib.asynccontextmanager
async def traced_target(
    model: Path, drafters: str = "", *, step_spans: bool = False, **settings: object
) -> AsyncIterator[tuple[Target, Spans]]:
    """A target, and its spans; at the end every one that was started has ended."""
    spans = Spans()
    tracing = spans.tracing("target", step_spans=step_spans)
    async with running_target(model, drafters, tracing=tracing, **settings) as target:
        yield target, spans
    assert spans.num_started == len(spans.all)
    assert len({span.span_id for span in spans.all}) == len(spans.all)


def called_by(flags: str = "01") -> list[tuple[str, str]]:
    """Metadata of a caller that has a trace."""
    return [("traceparent", f"00-{TRACE}-{PARENT}-{flags}")]


async def ids_of(call: Any) -> list[int]:
    """All token ids of a call."""
    return [token.id async for chunk in call for token in chunk.tokens]


async def only_span(spans: Spans, timeout_s: float = ENDED_S) -> Seen:
    """The one request's span, which has to be there soon after its end."""
    await spans.wait(lambda: spans.of("target", "generate"), timeout_s)
    (span,) = spans.of("target", "generate")
    return span


def line_of(entries: list) -> dict[str, Any]:
    """The one log line of the one request."""
    (line,) = [each for each in entries if each["event"] == "request"]
    return line


async def test_a_request_with_drafts(model: Path, log_entries: list) -> None:
    """One span under the caller's, with its phases one behind the other, rounds as events, and the
    same figures in its log line; the drafter is told which trace it works for."""
    prompt = list(range(5, 45))
    async with ScriptedDrafter(Drafting(Perfect(lambda _: []))) as drafter:
        async with traced_target(model, drafter.address) as (target, spans):
            await wait_for_drafters(target)
            text = await target.ids(make_request(prompt, 400))
            spans.all.clear()
            spans.num_started = 0
            log_entries.clear()
            drafter.behaviour = Drafting(Perfect({tuple(prompt): text}))
            request = make_request(prompt, 400, k=1)
            request.request_id = "river"
            call = target.stub.Generate(request, metadata=called_by(), timeout=50)
            assert await ids_of(call) == text
            span = await only_span(spans)

        counts = target.service.batcher.speculation
        line = line_of(log_entries)
        assert (span.trace_id, span.parent_span_id) == (TRACE, PARENT)
        assert (span.kind, span.status) == ("server", "unset")
        assert span.attributes["outrider.request_id"] == line["request_id"] == "river"
        assert span.attributes["outrider.outcome"] == line["outcome"] == "finished"
        assert span.attributes["outrider.prompt_tokens"] == line["prompt_tokens"] == 40
        assert span.attributes["outrider.generated_tokens"] == line["generated_tokens"] == 400
        assert span.attributes["outrider.finish_reasons"] == ["length"]
        assert span.attributes["outrider.drafted"] == line["drafted"] == counts.drafted
        assert span.attributes["outrider.accepted"] == line["accepted"] == counts.accepted > 190
        assert (line["trace_id"], line["span_id"]) == (TRACE, span.span_id)
        assert "error.type" not in span.attributes

        queue, prefill, decode = sorted(spans.children(span), key=lambda each: each.start_ns)
        assert [queue.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
        assert span.start_ns <= queue.start_ns and decode.end_ns <= span.end_ns
        assert queue.end_ns == prefill.start_ns and prefill.end_ns == decode.start_ns
        assert abs(decode.duration_s - line["decode_s"]) < 0.001
        assert decode.duration_s > 0.9 * (span.duration_s - prefill.duration_s - queue.duration_s)

        # The first 16 rounds, then one in 16.
        rounds = [attributes for name, attributes in decode.events if name == "round"]
        assert len(rounds) == 16 + (200 - 1) // 16
        assert [each["outrider.base_len"] for each in rounds[:3]] == [41, 43, 45]
        assert all(each["outrider.k"] == each["outrider.accepted"] == 1 for each in rounds)
        assert all(each["outrider.verify_ms"] > 0 for each in rounds)
        assert all(each["outrider.round_trip_ms"] > 0 for each in rounds[1:])
        openings = [
            each.update.open for each in drafter.record.updates if each.update.HasField("open")
        ]
        assert openings[-1].traceparent == f"00-{TRACE}-{span.span_id}-01"


async def test_every_choice_has_its_phases(model: Path) -> None:
    """Three choices: one span, three sets of phases, all tokens counted."""
    async with traced_target(model) as (target, spans):
        request = make_request([5, 6, 7], 12, temperature=1.0, seed=3)
        request.n = 3
        await target.choices(request)
        span = await only_span(spans)
        assert span.attributes["outrider.generated_tokens"] == 36
        phases = [(each.name, each.attributes["outrider.choice"]) for each in spans.children(span)]
        assert sorted(phases) == sorted(
            (name, index) for name in ("queue", "prefill", "decode") for index in range(3)
        )


async def cancel(target: Target, spans: Spans) -> None:
    """The client leaves in mid-stream."""
    call = target.stub.Generate(make_request([5, 6, 7], 4000), timeout=50)
    await call.read()
    call.cancel()


@contextlib.asynccontextmanager
async def unread_call(target: Target, max_tokens: int, num_prompt: int = 600) -> AsyncIterator[Any]:
    """A call that nobody reads. With its usual prompt the first message is too much already."""
    # Without a window of its own for what it has not read, a client that stalls shows sooner.
    options = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(target.address, options=options) as channel:
        request = make_request([5] * num_prompt, max_tokens)
        request.logprobs = request.prompt_logprobs = 20  # some 300 bytes a token
        yield target_pb2_grpc.TargetStub(channel).Generate(request, timeout=50)


async def cancel_in_a_yield(target: Target, spans: Spans) -> None:
    """The client does not read, and then leaves: its handler never runs again."""
    async with unread_call(target, 4000) as call:
        totals = target.service.batcher.totals
        while totals.generated_tokens < 20:
            await asyncio.sleep(0.02)
        call.cancel()


async def let_the_deadline_pass(target: Target, spans: Spans) -> None:
    """The client's own deadline."""
    with pytest.raises(grpc.aio.AioRpcError):
        await ids_of(target.stub.Generate(make_request([5, 6, 7], 4000), timeout=0.3))


async def ask_nonsense(target: Target, spans: Spans) -> None:
    """A request without a prompt."""
    with pytest.raises(grpc.aio.AioRpcError):
        await ids_of(target.stub.Generate(make_request([], 40), timeout=50))


async def find_the_line_full(target: Target, spans: Spans) -> None:
    """More choices than there is room for beside the one that runs."""
    busy = target.stub.Generate(make_request([5, 6, 7], 4000), timeout=50)
    await busy.read()
    request = make_request([5, 6], 40)
    request.n = 2
    with pytest.raises(grpc.aio.AioRpcError):
        await ids_of(target.stub.Generate(request, timeout=50))
    await only_span(spans)  # before the other one's


async def break_a_step(target: Target, spans: Spans) -> None:
    """The device fails."""

    def fail(plan: object) -> None:
        raise ArithmeticError("no such kernel")

    target.service.batcher._run_step = fail
    with pytest.raises(grpc.aio.AioRpcError):
        await ids_of(target.stub.Generate(make_request([5, 6, 7], 40), timeout=50))


async def shut_down(target: Target, spans: Spans) -> None:
    """The grace time is over, and the request is not."""
    call = target.stub.Generate(make_request([5, 6, 7], 4000), timeout=50)
    await call.read()
    assert await target.calls.drain(0.01) == 1
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        while await call.read() is not grpc.aio.EOF:
            pass


async def never_read(target: Target, spans: Spans) -> None:
    """Opened, and then nothing is read."""
    async with unread_call(target, 4000):
        await spans.wait(lambda: spans.of("target", "generate"))


@pytest.mark.parametrize(
    ("do", "outcome", "code", "status"),
    [
        (cancel, "cancelled", "cancelled", "unset"),
        (cancel_in_a_yield, "cancelled", "cancelled", "unset"),
        (let_the_deadline_pass, "cancelled", "deadline_exceeded", "error"),
        (ask_nonsense, "refused", "invalid_argument", "error"),
        (find_the_line_full, "refused", "resource_exhausted", "error"),
        (break_a_step, "failed", "internal", "error"),
        (shut_down, "failed", "unavailable", "error"),
        (never_read, "failed", "unavailable", "error"),
    ],
)
async def test_every_end_is_told_once(
    model: Path, log_entries: list, do: Any, outcome: str, code: str, status: str
) -> None:
    """One span and one line, soon after the end, that say how it ended; nothing is held."""
    settings = {"max_sequences": 1, "max_waiting": 1, "stall_s": 0.5 if do is never_read else 20}
    async with traced_target(model, kv_tokens=8192, stream_tokens=4000, **settings) as (
        target,
        spans,
    ):
        slow_steps(target, 0.001)
        await do(target, spans)
        span = await only_span(spans)
        line = line_of(log_entries)
        assert span.attributes["outrider.outcome"] == line["outcome"] == outcome
        assert span.attributes["error.type"] == line["code"] == code
        assert span.attributes["rpc.response.status_code"] == code.upper()
        assert span.status == status
        assert bool(span.status_message) == (status == "error")
        phases = {each.name for each in spans.children(span)}
        assert phases >= ({"queue"} if outcome != "refused" else set())
        totals = target.service.batcher.totals
        if outcome != "refused":
            assert getattr(totals, outcome) == totals.started == 1
            await quiet_status(target)


async def test_a_text_that_is_made_and_never_read(model: Path) -> None:
    """All tokens are made and the blocks are free, so nothing presses: the stream still ends after
    `stall_s`, and says so to a client that reads on."""
    async with (
        traced_target(model, stall_s=3.0) as (target, spans),
        unread_call(target, 160, num_prompt=1) as call,
    ):
        span = await only_span(spans, 15)
        assert (span.status, span.attributes["error.type"]) == ("error", "unavailable")
        assert span.attributes["outrider.generated_tokens"] == 160
        assert target.service.batcher.totals.finished == 1
        with pytest.raises(grpc.aio.AioRpcError, match="not read for 3 s") as caught:
            await ids_of(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_shared_step_is_linked_to_all_its_requests(model: Path) -> None:
    """Steps are traces of their own and children of nobody, not even of the first request."""
    async with traced_target(model, step_spans=True) as (target, spans):
        slow_steps(target, 0.002)
        both = [make_request([5, 6, n], 40) for n in (7, 8)]
        async with asyncio.TaskGroup() as group:
            for each in both:
                group.create_task(target.ids(each))
        await spans.wait(lambda: len(spans.of("target", "generate")) == 2, ENDED_S)
        requests = {(each.trace_id, each.span_id) for each in spans.of("target", "generate")}
        steps = spans.of("target", "step")
        assert all(step.parent_span_id == "" for step in steps)
        assert len({step.trace_id for step in steps} | {trace for trace, _ in requests}) == (
            len(steps) + 2
        )
        shared = [step for step in steps if step.attributes["outrider.sequences"] == 2]
        assert shared and all(set(step.links) == requests for step in shared)
        assert sum(len(step.links) for step in steps) >= 80

        await target.ids(make_request([9], 3))
        last = spans.of("target", "generate")[-1]
        assert last.parent_span_id == "" and last.trace_id not in {trace for trace, _ in requests}
        assert set(spans.of("target", "step")[-1].links) == {(last.trace_id, last.span_id)}


@pytest.mark.parametrize("traced", [True, False])
async def test_a_caller_that_is_not_sampled(model: Path, traced: bool) -> None:
    """No spans, of steps neither; with tracing on or off the drafter hears of the trace."""
    async with ScriptedDrafter(Drafting(Perfect(lambda _: []))) as drafter:
        spans = Spans()
        tracing = spans.tracing("target", step_spans=True) if traced else None
        async with running_target(model, drafter.address, tracing=tracing) as target:
            await wait_for_drafters(target)
            request = make_request([5, 6, 7], 20, k=2)
            await ids_of(target.stub.Generate(request, metadata=called_by("00"), timeout=50))
        assert spans.all == [] and spans.num_started == 0
        opening: draft_pb2.SequenceOpen = drafter.record.updates[0].update.open
        assert opening.traceparent.startswith(f"00-{TRACE}-")
        assert opening.traceparent.endswith("-00")


async def test_what_a_client_calls_its_request_is_cut(model: Path, log_entries: list) -> None:
    """A name that is refused for its length is not written out either."""
    async with traced_target(model) as (target, spans):
        request = make_request([5], 10)
        request.request_id = "x" * 5000
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await target.ids(request)
        span = await only_span(spans)
        assert len(span.attributes["outrider.request_id"]) == 128
        assert len(line_of(log_entries)["request_id"]) == 128


async def test_bytes_that_are_no_request_are_one_too(model: Path, log_entries: list) -> None:
    """A line and a span, as for every call that is refused."""
    async with traced_target(model) as (target, spans), open_channel(target.address) as channel:
        call = channel.unary_stream("/outrider.v1.Target/Generate")(b"\xff\xff", timeout=10)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "TokenRequest" in await call.details()
        assert (await only_span(spans)).attributes["outrider.outcome"] == "refused"
        line = line_of(log_entries)
        assert (line["outcome"], line["code"]) == ("refused", "invalid_argument")
