"""B43: spans that never end, or never were, for the requests that failed.

Symptom: the requests that one most needs to see are missing from the traces, or tracing changes how
a call is cancelled. Right: one span a request and service, ended once and within 2 s of the end,
over the whole stream; an error with its reason for what failed, a cancel marked as one; as many
spans ended as started; calls behave the same with tracing and without. Reported in public of
instrumentations that miss cancelled calls, streams that nobody reads, refusals, aborted requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc
from tests.support.gateways import gateway_on, until
from tests.support.otlp import Spans
from tests.support.processes import running_process
from tests.support.request_spans import CANCELLED, FINISHED, Told, assert_ends, told
from tests.support.token_streams import quiet_status, slow_steps
from tests.support.traced_stack import (
    ENDED_S,
    TracedStack,
    chat_request,
    read_all,
    traced_stack,
)

pytestmark = pytest.mark.timeout(60)

STEP_S = 0.02
Code = grpc.StatusCode
Action = Callable[[TracedStack], Awaitable[None]]


async def fails(stack: TracedStack, request: pb.GenerateRequest, code: Code, **call: Any) -> None:
    """The client is told so."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stack.gateway, request, **call)
    assert caught.value.code() is code


async def complete(stack: TracedStack) -> None:
    """Read to its end, as slowly as it comes."""
    slow_steps(stack.target, STEP_S)
    started_s = time.monotonic()
    await read_all(stack.gateway, chat_request("river", 60))
    took_s = time.monotonic() - started_s
    await stack.wait_ended()
    (gateway,) = stack.spans.of("gateway")
    first_s = gateway.attributes["outrider.time_to_first_token_s"]
    assert first_s + 3 * STEP_S < gateway.duration_s <= took_s + 0.05


async def leave(stack: TracedStack) -> None:
    """A client that has enough after three messages."""
    slow_steps(stack.target, STEP_S)
    call = stack.gateway.stub.Generate(chat_request("river", 400), timeout=50)
    for _ in range(3):
        await call.read()
    call.cancel()
    assert await call.code() is Code.CANCELLED


async def leave_at_once(stack: TracedStack) -> None:
    """Before anything has come: the target's step is not over yet."""
    slow_steps(stack.target, 0.5)
    call = stack.gateway.stub.Generate(chat_request("river", 400), timeout=50)
    batcher = stack.target.service.batcher
    await until(lambda: bool(batcher.scheduler.running))
    call.cancel()
    assert await call.code() is Code.CANCELLED


async def run_into_the_deadline(stack: TracedStack) -> None:
    """It takes longer than the client waits."""
    slow_steps(stack.target, STEP_S)
    await fails(stack, chat_request("river", 400), Code.DEADLINE_EXCEEDED, timeout_s=1.0)


async def ask_for_nonsense(stack: TracedStack) -> None:
    """A field outside its limits."""
    request = chat_request("river", 9)
    request.sampling.top_p = 7
    await fails(stack, request, Code.INVALID_ARGUMENT)


async def send_rubbish(stack: TracedStack) -> None:
    """Bytes that are no request."""
    method = stack.gateway.channel.unary_stream("/outrider.v1.Inference/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"\xff\xff\xff", timeout=10).read()
    assert caught.value.code() is Code.INVALID_ARGUMENT


async def find_the_line_full(stack: TracedStack) -> None:
    """Another one runs, and there is no room to wait; that one's client leaves later."""
    slow_steps(stack.target, STEP_S)
    first = stack.gateway.stub.Generate(chat_request("sea", 400, request_id="first"), timeout=50)
    await first.read()
    await fails(stack, chat_request("river", 9), Code.RESOURCE_EXHAUSTED)
    first.cancel()


async def lose_the_drafter(stack: TracedStack) -> None:
    """In the middle of the answer, which goes on without it."""
    slow_steps(stack.target, STEP_S)
    reading = asyncio.create_task(read_all(stack.gateway, chat_request("river", 60)))
    await until(lambda: stack.gateway.service._metrics.totals.delivered_tokens > 10)
    await stack.drafter.drain()
    assert await reading == 60


async def never_read(stack: TracedStack) -> None:
    """The client opens a stream, and that is all."""
    request = chat_request("river", 450)
    request.logprobs = 20
    # Without a window of its own for what it has not read, it shows sooner that nobody reads.
    options = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.gateway.address, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=50)
        totals = stack.gateway.service._metrics.totals
        await until(lambda: totals.started > 0 and not totals.running, timeout_s=30)
        call.cancel()


@dataclass(frozen=True)
class Case:
    """What is done, and what the spans of its request must say. None: there is no such span."""

    act: Action
    gateway: Told
    target: Told | None
    draft: str | None = None
    """Its outcome. Not checked for a request that ends before its drafter can have heard of it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the target, and `gateway` of the gateway."""


CASES = [
    Case(complete, FINISHED, FINISHED, "finished"),
    Case(leave, CANCELLED, CANCELLED, "finished"),
    Case(leave_at_once, CANCELLED, CANCELLED),
    Case(
        run_into_the_deadline,
        ("failed", "deadline_exceeded", "error"),
        ("cancelled", "deadline_exceeded", "error"),
        "finished",
    ),
    Case(ask_for_nonsense, ("refused", "invalid_argument", "error"), None),
    Case(send_rubbish, ("refused", "invalid_argument", "error"), None),
    Case(
        find_the_line_full,
        ("refused", "resource_exhausted", "error"),
        ("refused", "resource_exhausted", "error"),
        settings={"max_sequences": 1, "max_waiting": 0},
    ),
    Case(lose_the_drafter, FINISHED, FINISHED, "lost"),
    Case(
        never_read,
        ("failed", "unavailable", "error"),
        CANCELLED,
        settings={"gateway": {"stall_s": 0.5}, "kv_tokens": 8192},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
async def test_every_way_to_end_has_its_spans(tiny_model: Path, case: Case) -> None:
    """One a service, soon, with the right end; and none that was started and has not ended."""
    async with traced_stack(tiny_model, **case.settings) as stack:
        await case.act(stack)
        gateway = await assert_ends(stack, case.gateway, case.target, case.draft)
        assert gateway.attributes["rpc.response.status_code"] == (
            gateway.attributes.get("error.type", "ok").upper()
        )


async def test_a_target_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Its own span dies with it; those of the gateway and the drafter say what happened."""
    spans = Spans()
    async with (
        running_process(
            "target", tmp_path, model=tiny_model, drafters="", kv_tokens=4096
        ) as target,
        gateway_on(tiny_model, [target.address], tracing=spans.tracing("gateway")) as gateway,
    ):
        await gateway.wait_health(True)
        reading = asyncio.create_task(read_all(gateway, chat_request("river", 450)))
        await until(lambda: gateway.service._metrics.totals.delivered_tokens > 0)
        target.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is Code.UNAVAILABLE
        await spans.wait(lambda: spans.of("gateway"), ENDED_S)
    (span,) = spans.all
    assert told(span) == ("failed", "unavailable", "error")
    assert spans.num_started == 1


async def results_of_leaving(model: Path, traced: bool) -> list[Any]:
    """How calls end, by both ends' accounts, that leave in each of four ways."""
    results: list[Any] = []
    async with traced_stack(model, traced=traced) as stack:
        slow_steps(stack.target, STEP_S)
        for num_read in (0, 3):
            call = stack.gateway.stub.Generate(chat_request("river", 400), timeout=50)
            await until(lambda: bool(stack.target.service.batcher.scheduler.running))
            for _ in range(num_read):
                await call.read()
            call.cancel()
            results.append(await call.code())
            await quiet_status(stack.target)
        await fails(stack, chat_request("river", 400), Code.DEADLINE_EXCEEDED, timeout_s=1.0)
        await quiet_status(stack.target)
        async with open_channel(stack.gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(chat_request("river", 400), timeout=50)
            await call.read()
        results.append(await call.code())
        status = await quiet_status(stack.target)
        load = status.load
        results.append((load.started, load.finished, load.failed, load.cancelled, load.refused))
        totals = stack.gateway.service._metrics.totals
        await until(lambda: not totals.running)
        results.append({outcome.value: count for outcome, count in totals.ended.items()})
    return results


async def test_calls_end_the_same_with_tracing_and_without(tiny_model: Path) -> None:
    """Before the first message, between messages, at a deadline, with the whole connection."""
    without = await results_of_leaving(tiny_model, traced=False)
    assert await results_of_leaving(tiny_model, traced=True) == without
    assert without[:3] == [Code.CANCELLED] * 3
    assert without[3] == (4, 0, 0, 4, 0)
    assert without[4] == {"finished": 0, "failed": 1, "cancelled": 3, "refused": 0}
