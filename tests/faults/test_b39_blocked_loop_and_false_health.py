"""B39: compute blocks the event loop; health lies in either direction.

Symptom: while long prompts are read, probes time out and a healthy process is killed; or the engine
is dead, the probes are green, and requests hang. Right: health and new connections are answered
within half a second whatever is computed; when a step fails for good, never returns, or the loop is
lost, readiness and liveness turn bad within seconds, everybody who waits gets an error and new
requests are refused; an idle engine is healthy, and a drafter that is away changes nothing.
Reported in public of several servers: tokenising that starves health checks, a green probe in front
of a hung engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from outrider.serving.channel import open_channel
from outrider.serving.health import LIVENESS
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2, target_pb2, target_pb2_grpc
from tests.support.draft_scripts import Mute
from tests.support.gateways import gateway_on
from tests.support.in_process import Target, running_target
from tests.support.processes import running_process
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import wait_for_drafters
from tests.support.token_streams import OFF, TimedStream, greedy, wait_until

pytestmark = pytest.mark.timeout(60)

NOTICED_S = 5.0
STEP_TIMEOUT_S = 1.0
READY_NAMES = ("", "outrider.v1.Target")
_STATES = health_pb2.HealthCheckResponse


class StuckStep:
    """Every step waits for ever; `release` at the end lets the thread go."""

    def __init__(self) -> None:
        self._gate = threading.Event()

    def break_it(self, target: Target) -> None:
        """From now on."""
        target.service.batcher._run_step = self._run

    def release(self) -> None:
        """Let the lost thread end."""
        self._gate.set()

    def _run(self, plan: Any) -> Any:
        self._gate.wait(60)
        raise ArithmeticError("too late")


class RaisingStep:
    """Every step fails for everybody."""

    def break_it(self, target: Target) -> None:
        """From now on."""
        target.service.batcher._run_step = self._run

    def release(self) -> None:
        """Nothing is held."""

    def _run(self, plan: Any) -> Any:
        raise ArithmeticError("broken")


class LostLoop:
    """The task that runs the steps is cancelled from outside."""

    def break_it(self, target: Target) -> None:
        """Once."""
        target.service.batcher._task.cancel()

    def release(self) -> None:
        """Nothing is held."""


FAULTS = {"raises": RaisingStep, "never returns": StuckStep, "is lost": LostLoop}


async def health_of(channel: grpc.aio.Channel, name: str) -> int:
    """What a probe sees."""
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status


async def error_of(target: Target, request: target_pb2.TokenRequest) -> grpc.aio.AioRpcError:
    """How a request ends that must not end well."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in target.stub.Generate(request, timeout=30):
            pass
    return caught.value


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_dead_engine_says_so(fault: str, tiny_model: Path) -> None:
    """Running and waiting requests end with INTERNAL, readiness and liveness turn bad, new requests
    are refused at once, and the gateway in front is alive but no longer ready."""
    broken = FAULTS[fault]()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(capture_logs())  # a rendered traceback would block the loop here
        target = await stack.enter_async_context(
            running_target(tiny_model, max_sequences=2, step_timeout_s=STEP_TIMEOUT_S)
        )
        stack.callback(broken.release)
        gateway = await stack.enter_async_context(gateway_on(tiny_model, [target.address]))
        await gateway.wait_health(True)
        channel = await stack.enter_async_context(open_channel(target.address))
        requests = [greedy([5, i], 450, OFF) for i in range(3, 9)]
        streams = [target.stub.Generate(each, timeout=30) for each in requests[:2]]
        assert all([await stream.read() for stream in streams])
        streams += [target.stub.Generate(each, timeout=30) for each in requests[2:]]

        async def all_there() -> bool:
            return (await target.status()).load.started == len(streams)

        await wait_until(all_there, 5, every_s=0.001)
        broken.break_it(target)
        broken_s = time.monotonic()
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        for name in (*READY_NAMES, LIVENESS):
            assert await health_of(channel, name) == _STATES.NOT_SERVING
        assert time.monotonic() - broken_s < NOTICED_S
        refused = await error_of(target, greedy([5, 6], 5))
        assert refused.code() is grpc.StatusCode.INTERNAL
        assert "the engine is dead" in refused.details()
        status = await target.status()
        assert status.state == "dead"
        assert status.load.running == status.load.waiting == status.pool.used == 0
        assert status.load.failed == len(streams)
        await gateway.wait_health(False)
        assert await health_of(gateway.channel, LIVENESS) == _STATES.SERVING


async def test_a_stuck_step_does_not_keep_the_process(tiny_model: Path) -> None:
    """Whoever restarts a target whose step never returns does not wait for that step."""
    broken = StuckStep()
    started_s = 0.0
    with capture_logs():
        async with running_target(tiny_model, step_timeout_s=0.3) as target:
            broken.break_it(target)
            assert "has not answered" in (await error_of(target, greedy([5, 6], 5))).details()
            started_s = time.monotonic()
    assert time.monotonic() - started_s < 2
    broken.release()


async def test_an_idle_engine_is_healthy_without_its_drafter_too(tiny_model: Path) -> None:
    """Longer than a step may take nothing happens, and a drafter comes and goes: a watcher is told
    SERVING once and nothing else."""
    seen: list[int] = []

    async def watch(channel: grpc.aio.Channel, name: str) -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
            seen.append(answer.status)

    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafter.address, step_timeout_s=0.2) as target,
        open_channel(target.address) as channel,
    ):
        await wait_for_drafters(target)
        watches = [asyncio.create_task(watch(channel, n)) for n in (*READY_NAMES, LIVENESS)]
        for _ in range(2):
            await drafter.stop()

            async def degraded() -> bool:
                return (await target.status()).state == "degraded"

            await wait_until(degraded, 5)
            await asyncio.sleep(0.3)
            await drafter.start()
        assert seen == [_STATES.SERVING] * 3
        assert len(await target.ids(greedy([5, 6], 5))) == 5
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


@dataclass
class Probe:
    """Health checks each 100 ms, each second one over a new connection."""

    address: str
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        async with open_channel(self.address) as channel:
            while True:
                await self._check(channel)
                async with open_channel(self.address) as new:
                    await self._check(new)

    async def _check(self, channel: grpc.aio.Channel) -> None:
        started_s = time.monotonic()
        try:
            status = await health_of(channel, "")
        except grpc.aio.AioRpcError as error:
            self.failures.append(str(error))
        else:
            if status != _STATES.SERVING:
                self.failures.append(_STATES.ServingStatus.Name(status))
        self.seconds.append(time.monotonic() - started_s)
        await asyncio.sleep(0.1)

    @property
    def p99_s(self) -> float:
        """The worst but one in a hundred."""
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


@contextlib.asynccontextmanager
async def probed(*addresses: str) -> AsyncIterator[list[Probe]]:
    """Probes that run while the block does."""
    probes = [Probe(address) for address in addresses]
    tasks = [asyncio.create_task(probe.run()) for probe in probes]
    try:
        yield probes
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def long_request(number: int, num_bytes: int) -> pb.GenerateRequest:
    """A text of many tokens that shares no beginning with the others."""
    words = f"room {number} and the quick brown fox of the hill and the sea "
    return pb.GenerateRequest(
        text=(words * (num_bytes // len(words) + 1))[:num_bytes],
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=4, ignore_eos=True),
    )


async def check_long_prompts(folder: Path, log_folder: Path, count: int, num_bytes: int) -> None:
    """That many at once, beside a stream and the probes, with gateway and target as processes."""
    model = make_tiny_model(folder, max_len=16384)
    async with (
        running_process(
            "target", log_folder, model=model, drafters="", kv_tokens=16384 * (count + 1)
        ) as target,
        running_process("gateway", log_folder, model=model, targets=target.address) as gateway,
    ):
        await gateway.wait_serving()
        async with (
            open_channel(target.address) as channel,
            open_channel(gateway.address) as front,
            probed(target.address, gateway.address) as probes,
        ):
            stream = TimedStream()
            stub = target_pb2_grpc.TargetStub(channel)
            reading = asyncio.create_task(stream.run(stub, greedy([5, 6], 1500, OFF), 200))
            answers = await asyncio.gather(
                *(ask_front(front, long_request(i, num_bytes)) for i in range(count))
            )
            await reading
    assert all(answer.usage.prompt_tokens >= 7500 for answer in answers)
    for probe in probes:
        assert probe.failures == []
        assert len(probe.seconds) > 5
        assert probe.p99_s < 0.5, probe.seconds


async def ask_front(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> pb.GenerateFinish:
    """The end of one answer."""
    finish = None
    async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=200):
        finish = response.finish if response.HasField("finish") else finish
    assert finish is not None
    return finish


async def test_a_long_prompt_does_not_hold_up_the_probes(tmp_path: Path) -> None:
    """One of 30 kB and more than 7,500 tokens: no probe fails, and they are quick."""
    await check_long_prompts(tmp_path / "model", tmp_path, 1, 30_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_eight_long_prompts_do_not_hold_up_the_probes(tmp_path: Path) -> None:
    """Eight of them at once."""
    await check_long_prompts(tmp_path / "model", tmp_path, 8, 30_000)
