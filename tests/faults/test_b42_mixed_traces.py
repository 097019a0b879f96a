"""B42: traces that are split, or mixed between requests.

Symptom: a request's spans hang under another's trace, or begin a new one where the next service
begins. Right: each request has one trace through gateway, target and drafter; a given trace id is
kept, a malformed one is replaced; a step that is shared is linked to its requests and the child of
none; what is not sampled has no span anywhere; the request that came first leaves nothing behind
for those that come later. Reported in public: the ambient context of another request was used, and
services made siblings or two traces instead of parent and child.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import target_pb2, target_pb2_grpc
from tests.support.doors import Door, GrpcDoor, Headers, HttpDoor, http_port
from tests.support.gateways import Gateway
from tests.support.otlp import Seen, Spans, collector
from tests.support.processes import running_process
from tests.support.token_streams import wait_until
from tests.support.traced_stack import assert_whole, chain_under, traced_stack

NUM_TOKENS = 40
NUM_GIVEN, NUM_NONE = 10, 5
MALFORMED = ("00-nonsense", f"00-{'0' * 32}-{'1' * 16}-01")
SPELLINGS = ("traceparent", "Traceparent", "TraceParent", "TRACEPARENT")
NUM_TRACED = NUM_GIVEN + NUM_NONE + len(MALFORMED)


def new_traceparent(flags: str = "01") -> tuple[str, str, str]:
    """(header, trace id, span id) of a caller."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def whole_chains(spans: Spans) -> list[Seen]:
    """The gateway's spans, each of which has its two others under it and in no other place."""
    gateways = spans.of("gateway")
    for span in gateways:
        assert_whole(chain_under(spans, span))
    assert len({span.trace_id for span in gateways}) == len(gateways)
    return gateways


async def check_requests(door: Door, spans: Spans) -> None:
    """18 side by side, one of them not sampled, and then one more."""
    callers = [new_traceparent() for _ in range(NUM_GIVEN)]
    unsampled, unsampled_trace, _ = new_traceparent("00")
    headers: list[str | None] = [header for header, _, _ in callers]
    headers += [None] * NUM_NONE + list(MALFORMED) + [unsampled]

    async def ask(number: int, header: str | None) -> None:
        name = SPELLINGS[number % len(SPELLINGS)]
        sent: Headers = () if header is None else ((name, header),)
        assert await door.chat(f"river {number}", NUM_TOKENS, f"r{number}", sent) == NUM_TOKENS

    await asyncio.gather(*(ask(number, header) for number, header in enumerate(headers)))
    await spans.wait(lambda: complete(spans, NUM_TRACED))
    gateways = {span.attributes["outrider.request_id"]: span for span in whole_chains(spans)}
    assert set(gateways) == {f"r{number}" for number in range(NUM_TRACED)}
    for number, (_, trace_id, span_id) in enumerate(callers):
        span = gateways[f"r{number}"]
        assert (span.trace_id, span.parent_span_id) == (trace_id, span_id)
    for number in range(NUM_GIVEN, NUM_TRACED):
        assert gateways[f"r{number}"].parent_span_id == ""
    assert spans.trace(unsampled_trace) == []

    await asyncio.sleep(0.2)  # everything is idle
    await ask(NUM_TRACED + 1, None)
    await spans.wait(lambda: complete(spans, NUM_TRACED + 1))
    last = whole_chains(spans)[-1]
    assert last.attributes["outrider.request_id"] == f"r{NUM_TRACED + 1}"
    assert last.parent_span_id == ""


def complete(spans: Spans, num_requests: int) -> bool:
    """All three services have sent a span for each of them."""
    counts = [len(spans.of(*each)) for each in (("gateway",), ("target", "generate"), ("draft",))]
    return counts == [num_requests] * 3


def check_steps(spans: Spans) -> None:
    """Each is a trace of its own, linked to the requests that shared it."""
    requests = {(span.trace_id, span.span_id): span for span in spans.of("target", "generate")}
    steps = spans.of("target", "step")
    for step in steps:
        assert step.parent_span_id == "" and spans.trace(step.trace_id) == [step]
        assert set(step.links) <= set(requests)
        assert len(set(step.links)) == len(step.links) >= 1
        # The one that is not sampled is in the batch and has no span.
        assert 0 <= step.attributes["outrider.sequences"] - len(step.links) <= 1
    assert max(len(step.links) for step in steps) >= 5
    assert {link for step in steps for link in step.links} == set(requests)
    last = max(requests.values(), key=lambda span: span.start_ns)
    for step in steps:
        if step.start_ns > last.start_ns:
            assert step.links == [(last.trace_id, last.span_id)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["grpc", "http"])
async def test_traces_of_requests_that_share_steps(tiny_model: Path, name: str) -> None:
    """All services in one process, where every mix-up of contexts is possible."""
    sizes = {"kv_tokens": 8192, "max_sequences": 32}
    front = {"http_port": 0}
    async with traced_stack(tiny_model, step_spans=True, gateway=front, **sizes) as stack:
        gateway = stack.gateway
        door: Door = HttpDoor(http_port(gateway)) if name == "http" else GrpcDoor(gateway)
        await check_requests(door, stack.spans)
        check_steps(stack.spans)
        await stack.wait_ended()


async def drafters_are_ready(channel: grpc.aio.Channel) -> bool:
    """All have shaken hands with the target at the other end."""
    request = target_pb2.TargetGetStatusRequest()
    status = await target_pb2_grpc.TargetStub(channel).GetStatus(request, timeout=5)
    return all(each.state == "ready" for each in status.drafters)


@contextlib.asynccontextmanager
async def processes(model: Path, folder: Path, spans: Spans) -> AsyncIterator[dict[str, Door]]:
    """The doors of the three services as they are deployed, with their spans to a collector."""
    environment = spans.environment
    async with (
        running_process("draft", folder, environment=environment) as draft,
        running_process(
            "target",
            folder,
            environment=environment,
            model=model,
            drafters=draft.address,
            kv_tokens=8192,
        ) as target,
        running_process(
            "gateway", folder, environment=environment, model=model, targets=target.address
        ) as gateway,
    ):
        await gateway.wait_serving()
        async with open_channel(target.address) as channel:
            await wait_until(lambda: drafters_are_ready(channel), 15)
        async with open_channel(gateway.address) as channel:
            yield {
                "grpc": GrpcDoor(Gateway(gateway.address, channel, None)),
                "http": HttpDoor(gateway.http_port),
            }


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["grpc", "http"])
async def test_traces_through_a_real_collector(tiny_model: Path, tmp_path: Path, name: str) -> None:
    """The same by OTLP from three processes, as the standard variables tell them."""
    async with collector() as spans, processes(tiny_model, tmp_path, spans) as doors:
        await check_requests(doors[name], spans)
