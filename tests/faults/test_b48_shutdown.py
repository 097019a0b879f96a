"""B48: a shutdown loses tokens, or hangs.

Symptom: SIGTERM cuts streams without a status, or the process does not end and has to be killed.
Right: readiness turns bad first and new requests are refused with UNAVAILABLE; streams that can end
in time do so, with their usage; the others end at the end of the grace time with an error that says
why; the process is gone with status 0 at most 5 s later, without a traceback; and a drafter that
goes costs nobody anything. Reported in public: a termination that hangs behind a cancelled stream,
an event loop that never returns, open streams that block a graceful stop.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.serving.channel import open_channel
from outrider.serving.health import LIVENESS
from protos.outrider.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from tests.support.processes import ServiceProcess, running_process
from tests.support.tiny_models import make_tiny_model
from tests.support.token_streams import AUTO, OFF, greedy

pytestmark = pytest.mark.timeout(90)

GRACE_S = 3.0
EXIT_S = 5.0
SHORT, LONG = 100, 14_000
"""Tokens of the streams that end within the grace time, and of those that do not."""
PROMPT = [7, 8, 9]
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context that is not full before the grace time is over."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=16384)


@dataclass
class Stream:
    """What one client has got, from either service."""

    count: int = 0
    usage: sampling_pb2.Usage | None = None
    error: grpc.aio.AioRpcError | None = None
    ids: list[int] = field(default_factory=list)

    async def read(self, call: grpc.aio.UnaryStreamCall) -> None:
        """Read to whatever end."""
        try:
            async for message in call:
                self.take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    def take(self, message: target_pb2.TokenChunk | inference_pb2.GenerateResponse) -> None:
        """The next message."""
        if isinstance(message, inference_pb2.GenerateResponse):
            tokens = message.chunk.tokens
            end = message.finish if message.HasField("finish") else None
        else:
            tokens = message.tokens
            end = message.finish if message.HasField("finish") else None
        self.ids.extend(token.id for token in tokens)
        self.usage = end.usage if end is not None else None


Ask = Callable[[grpc.aio.Channel, int], grpc.aio.UnaryStreamCall]


def ask_target(channel: grpc.aio.Channel, num_tokens: int) -> grpc.aio.UnaryStreamCall:
    """A request for tokens."""
    return target_pb2_grpc.TargetStub(channel).Generate(greedy(PROMPT, num_tokens), timeout=60)


def ask_gateway(channel: grpc.aio.Channel, num_tokens: int) -> grpc.aio.UnaryStreamCall:
    """A request for text."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
    )
    return inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)


@dataclass(frozen=True)
class Stack:
    """All three services as processes, connected."""

    draft: ServiceProcess
    target: ServiceProcess
    gateway: ServiceProcess


@pytest.fixture
async def stack(model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    """Ready, with a grace time that a test can wait for."""
    async with (
        running_process("draft", tmp_path, grace_s=GRACE_S) as draft,
        running_process(
            "target", tmp_path, model=model, drafters=draft.address, kv_tokens=120_000,
            grace_s=GRACE_S, stream_tokens=64,
        ) as target,
        running_process(
            "gateway", tmp_path, model=model, targets=target.address, grace_s=GRACE_S
        ) as gateway,
    ):  # fmt: skip
        await gateway.wait_serving()
        await target.wait_event("drafter ready")
        yield Stack(draft, target, gateway)


async def health_of(channel: grpc.aio.Channel, name: str) -> str:
    """SERVING or NOT_SERVING."""
    request = health_pb2.HealthCheckRequest(service=name)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def stall(call: grpc.aio.UnaryStreamCall) -> grpc.aio.UnaryStreamCall:
    """A client that takes one message and then does nothing."""
    async for _ in call:
        break
    return call


async def check_shutdown(process: ServiceProcess, ask: Ask, number: signal.Signals) -> None:
    """A signal with short, long and stalled streams open."""
    async with open_channel(process.address) as channel, open_channel(process.address) as other:
        stalled = await stall(ask(other, LONG))
        streams = [Stream() for _ in range(10)]
        lengths = [SHORT, LONG] * 5
        readers = [
            asyncio.create_task(stream.read(ask(channel, length)))
            for stream, length in zip(streams, lengths, strict=True)
        ]
        async with asyncio.timeout(20):
            while not all(stream.ids for stream in streams):
                await asyncio.sleep(0.005)
        started_s = time.monotonic()
        process.process.send_signal(number)
        await process.wait_event("draining")
        assert await health_of(channel, "") == "NOT_SERVING"
        assert await health_of(channel, LIVENESS) == "SERVING"
        refused = Stream()
        await refused.read(ask(channel, 5))
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in refused.error.details()
        await asyncio.wait_for(asyncio.gather(*readers), GRACE_S + EXIT_S)
        for stream in streams[::2]:
            assert stream.error is None
            assert stream.usage.completion_tokens == len(stream.ids) == SHORT
        for stream in streams[1::2]:
            assert stream.error is not None, "a stream that was cut off ended as if it were whole"
            assert stream.error.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in stream.error.details()
            assert 0 < len(stream.ids) < LONG
        assert await process.wait_exit(GRACE_S + EXIT_S) == 0, process.output
        assert GRACE_S <= time.monotonic() - started_s <= GRACE_S + EXIT_S
        assert "Traceback" not in process.output
        left_over = Stream()
        await left_over.read(stalled)
        assert left_over.error is not None, "the stalled client was told that all is well"


async def check_drafter_leaves(stack: Stack) -> None:
    """SIGTERM to the drafter under ten streams: it is gone soon, they are whole."""
    async with open_channel(stack.target.address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        prompts = [[7 + i, 8, 9] for i in range(10)]
        alone, streams = [Stream() for _ in prompts], [Stream() for _ in prompts]
        reading = []
        for group, mode in ((alone, OFF), (streams, AUTO)):
            await asyncio.gather(*reading)
            reading = [
                asyncio.create_task(each.read(stub.Generate(greedy(p, 300, mode), timeout=60)))
                for each, p in zip(group, prompts, strict=True)
            ]
        while not all(stream.ids for stream in streams):
            await asyncio.sleep(0.005)
        started_s = time.monotonic()
        stack.draft.terminate()
        assert await stack.draft.wait_exit(EXIT_S) == 0, stack.draft.output
        assert time.monotonic() - started_s < GRACE_S
        assert "Traceback" not in stack.draft.output
        await asyncio.gather(*reading)
    for stream, expected in zip(streams, alone, strict=True):
        assert stream.error is None
        assert stream.ids == expected.ids


async def wait_drafter_ready(target: ServiceProcess) -> None:
    """Until the target has a stream to its drafter."""
    async with open_channel(target.address) as channel, asyncio.timeout(20):
        stub = target_pb2_grpc.TargetStub(channel)
        while True:
            status = await stub.GetStatus(target_pb2.TargetGetStatusRequest(), timeout=5)
            if [each.state for each in status.drafters] == ["ready"]:
                return
            await asyncio.sleep(0.05)


async def test_each_service_in_turn_goes_in_order(stack: Stack, tmp_path: Path) -> None:
    """SIGTERM to the drafter, whose streams go on; SIGINT to the gateway and SIGTERM to the target,
    with five streams that end in time, five that do not and one whose client has stopped."""
    await check_drafter_leaves(stack)
    port = stack.draft.port
    async with running_process("draft", tmp_path, port=port, grace_s=GRACE_S) as draft:
        await wait_drafter_ready(stack.target)
        await check_shutdown(stack.gateway, ask_gateway, signal.SIGINT)
        await check_shutdown(stack.target, ask_target, signal.SIGTERM)
        assert draft.process.poll() is None


@pytest.mark.slow
async def test_a_target_without_open_streams_goes_at_once(stack: Stack) -> None:
    """A gateway that watches its health, and a drafter's stream, are no reason to wait."""
    started_s = time.monotonic()
    stack.target.terminate()
    assert await stack.target.wait_exit(EXIT_S) == 0, stack.target.output
    assert time.monotonic() - started_s < GRACE_S
    assert "Traceback" not in stack.target.output


_ENDLESS_LOAD = """
import time
from concurrent.futures import ThreadPoolExecutor
from outrider.serving.settings import {settings}
from {module} import service
def resolve(*args, **more):
    print("loading", flush=True)
    with ThreadPoolExecutor(1) as pool:  # as huggingface_hub does
        pool.submit(time.sleep, 120)
service.resolve = resolve
service.run({settings}(port=0, metrics_port=0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "settings"),
    [("target_service", "TargetSettings"), ("gateway", "GatewaySettings")],
)
async def test_sigterm_while_a_model_is_loaded(tmp_path: Path, module: str, settings: str) -> None:
    """A load that takes for ever does not hold the process, and no thread that it has made."""
    log = (tmp_path / "log").open("w+")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _ENDLESS_LOAD.format(module=module, settings=settings)),
        cwd=_ROOT,
        env={"PYTHONPATH": f"{_ROOT}:{_ROOT / 'kernels'}"},
        stdout=log,
        stderr=log,
    )
    try:
        async with asyncio.timeout(60):
            while "loading" not in (tmp_path / "log").read_text():
                await asyncio.sleep(0.02)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), EXIT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        log.close()
    assert "Traceback" not in (tmp_path / "log").read_text()
