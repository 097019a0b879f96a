"""B53: the trace collector is down.

Symptom: requests stall while spans are exported, or the shutdown takes minutes. Right, whether the
collector refuses, is deaf, or answers after 10 s, and also where it is not there at the start:
services start and answer at the same speed; memory is bounded, and what does not fit is counted;
the log has one line a minute about it; SIGTERM ends them within the grace time and 10 s. Reported
in public: exports inside the path of a request, and retries that hold the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.cli.demo import free_ports
from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2
from tests.support.gateways import target_status, write_tokenizer_folder
from tests.support.otlp import environment_for, receiver
from tests.support.processes import ServiceProcess, running_process
from tests.support.scripted_target import Script, serving

pytestmark = pytest.mark.timeout(120)

GRACE_S = 2.0
EXIT_S = GRACE_S + 10
NUM_REQUESTS = 100
SMALL_QUEUE = {"OTEL_BSP_MAX_QUEUE_SIZE": "20", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10"}
"""So few that a hundred requests show what a day does."""


@contextlib.asynccontextmanager
async def refusing() -> AsyncIterator[dict[str, str]]:
    """Nobody listens."""
    (port,) = free_ports(1)
    yield environment_for(port)


@contextlib.asynccontextmanager
async def deaf() -> AsyncIterator[dict[str, str]]:
    """Connections are made, and nothing is ever read or said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield environment_for(listener.getsockname()[1])


@contextlib.asynccontextmanager
async def slow() -> AsyncIterator[dict[str, str]]:
    """Every answer takes 10 s."""
    async with receiver() as collector:
        collector.delay_s = 10
        yield collector.spans.environment


CONDITIONS = {"refusing": refusing, "deaf": deaf, "slow": slow}


@dataclass(frozen=True)
class Stack:
    """Services as processes, connected, and a client's stub."""

    services: list[ServiceProcess]
    """In the order in which they are ended: the gateway, and behind it target and draft."""
    stub: inference_pb2_grpc.InferenceStub

    async def ask(self, number: int, num_tokens: int = 8) -> float:
        """One whole answer; its seconds."""
        began_s = time.perf_counter()
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[7, 8, number % 200 + 3]),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        messages = [each async for each in self.stub.Generate(request, timeout=60)]
        assert messages[-1].finish.usage.completion_tokens == num_tokens
        return time.perf_counter() - began_s


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Stack]:
    """A gateway alone, in front of a scripted target."""
    model = write_tokenizer_folder(folder / "model")
    async with (
        serving(Script(ids=range(5, 50)), target_status(model)) as target,
        running_process(
            "gateway",
            log_folder=folder,
            environment=environment,
            grace_s=GRACE_S,
            model=model,
            targets=target.address,
        ) as gateway,
        open_channel(gateway.address) as channel,
    ):
        await gateway.wait_serving()
        yield Stack([gateway], inference_pb2_grpc.InferenceStub(channel))


@contextlib.asynccontextmanager
async def running_stack(
    folder: Path, model: Path, environment: Mapping[str, str]
) -> AsyncIterator[Stack]:
    """All three, started while the collector is as it is."""
    common = {"log_folder": folder, "environment": environment, "grace_s": GRACE_S}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        draft = await enter(running_process("draft", **common))
        target = await enter(
            running_process("target", model=model, drafters=draft.address, **common)
        )
        gateway = await enter(
            running_process("gateway", model=model, targets=target.address, **common)
        )
        await gateway.wait_serving()
        channel = await enter(open_channel(gateway.address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        yield Stack([gateway, target, draft], stub)


async def spans_dropped(service: ServiceProcess) -> float:
    """As its metrics say now."""

    def read() -> str:
        url = f"http://127.0.0.1:{service.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return next(f.samples[0].value for f in families if f.name == "outrider_spans_dropped")


async def ends_well(stack: Stack) -> None:
    """SIGTERM to each: status 0 in time, no traceback, and of the collector a line or two."""
    for service in stack.services:
        began_s = time.monotonic()
        service.terminate()
        assert await service.wait_exit(EXIT_S) == 0, service.output
        assert time.monotonic() - began_s < EXIT_S
        assert "Traceback" not in service.output
        heard = [e for e in service.events if "collector" in e["event"] or "export" in e["event"]]
        assert len(heard) <= 1, service.output
        lost = [event for event in service.events if event["event"] == "spans were lost"]
        assert len(lost) == 1, service.output


async def goes_on_and_ends(stack: Stack) -> None:
    """A hundred answers, every span counted that had no room, and an end in time."""
    for first in range(0, NUM_REQUESTS, 10):
        await asyncio.gather(*(stack.ask(first + number) for number in range(10)))
    for service in stack.services:
        if service.service != "draft":  # not each request is worth a draft
            # Each request has at least one span, and 20 may wait or be on their way.
            assert await spans_dropped(service) >= NUM_REQUESTS - 20, service.output
    await ends_well(stack)


@pytest.mark.parametrize("condition", CONDITIONS)
async def test_requests_go_on_and_the_end_is_on_time(condition: str, tmp_path: Path) -> None:
    """At a gateway: nobody waits for a collector, and no request is lost with its span."""
    async with (
        CONDITIONS[condition]() as environment,
        running_gateway(tmp_path, environment | SMALL_QUEUE) as stack,
    ):
        await goes_on_and_ends(stack)


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
async def test_the_same_of_all_three(condition: str, tmp_path: Path, tiny_model: Path) -> None:
    """At a gateway, a target and a drafter, which all send spans."""
    async with (
        CONDITIONS[condition]() as environment,
        running_stack(tmp_path, tiny_model, environment | SMALL_QUEUE) as stack,
    ):
        await goes_on_and_ends(stack)


async def test_the_last_spans_leave_with_the_process(tmp_path: Path) -> None:
    """Where the next batch would be due in an hour, a collector has all of them at the exit."""
    async with receiver() as collector:
        environment = collector.spans.environment | {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        async with running_gateway(tmp_path, environment) as stack:
            await asyncio.gather(*(stack.ask(number) for number in range(5)))
            (gateway,) = stack.services
            assert await spans_dropped(gateway) == 0
            assert collector.spans.all == []
            gateway.terminate()
            assert await gateway.wait_exit(EXIT_S) == 0, gateway.output
        assert len(collector.spans.of("gateway")) == 5
        assert "lost" not in gateway.output


async def test_a_collector_that_comes_later_is_used(tmp_path: Path) -> None:
    """A service starts without it, and needs no restart when it is there."""
    (port,) = free_ports(1)
    async with running_gateway(tmp_path, environment_for(port)) as stack:
        await stack.ask(0)
        async with receiver(port) as collector:
            await collector.spans.wait(lambda: collector.spans.of("gateway"), timeout_s=30)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("condition", CONDITIONS)
async def test_answers_are_as_fast_as_without_traces(
    condition: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Medians of the same requests at two stacks in turn differ by less than 10 %."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    async with (
        CONDITIONS[condition]() as environment,
        running_stack(tmp_path, tiny_model, {}) as without,
        running_stack(tmp_path, tiny_model, environment) as traced,
    ):
        stacks = {False: without, True: traced}
        for number in range(NUM_REQUESTS + 10):
            # Each goes first as often as the other.
            for on in (True, False) if number % 2 else (False, True):
                took_s = await stacks[on].ask(number, num_tokens=32)
                if number >= 10:  # the first ones warm both up
                    seconds[on].append(took_s)
    without_s, traced_s = (statistics.median(seconds[on]) for on in (False, True))
    print(f"{condition}: {without_s * 1e3:.1f} ms without traces, {traced_s * 1e3:.1f} ms with")
    assert traced_s < 1.1 * without_s
