"""Outrider as it is deployed: its services as processes, and clients over gRPC in this one.

    python -m bench.peers.worker_outrider MODEL DTYPE THREADS gateway|target

`target` asks the target itself, with no gateway before it. No drafts, and no prefix cache, which
would know a prompt that comes again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable

import grpc
import uvloop

from bench.peers.lines import Answer, Ask, serve
from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.serving.channel import open_channel
from outrider.serving.settings import GatewaySettings, TargetSettings
from protos.outrider.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)

Stream = Callable[[list[int], int], AsyncIterator[list[int]]]
"""The tokens of an answer, as they come."""

_GREEDY = sampling_pb2.SamplingParams(temperature=0.0)
_OFF = sampling_pb2.SpeculationParams(mode=sampling_pb2.SpeculationParams.MODE_OFF)


def _stopping(num_tokens: int) -> sampling_pb2.StoppingParams:
    return sampling_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True)


def precision_of(address: str) -> str:
    """What a target's model is kept in."""
    with grpc.insecure_channel(address) as channel:
        status = target_pb2_grpc.TargetStub(channel).GetStatus(target_pb2.TargetGetStatusRequest())
    return str(status.precision)


def from_gateway(address: str) -> Stream:
    """Asks a gateway."""
    stub = inference_pb2_grpc.InferenceStub(open_channel(address))

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[list[int]]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=_GREEDY,
            stopping=_stopping(num_tokens),
            speculation=_OFF,
        )
        async for response in stub.Generate(request):
            if response.HasField("chunk"):
                yield [token.id for token in response.chunk.tokens]

    return stream


def from_target(address: str) -> Stream:
    """Asks a target."""
    stub = target_pb2_grpc.TargetStub(open_channel(address))

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[list[int]]:
        request = target_pb2.TokenRequest(
            token_ids=prompt,
            sampling=_GREEDY,
            stopping=_stopping(num_tokens),
            speculation=_OFF,
        )
        async for chunk in stub.Generate(request):
            yield [token.id for token in chunk.tokens]

    return stream


async def answer(stream: Stream, prompts: list[list[int]], num_tokens: int) -> Answer:
    """All at once."""
    began = time.perf_counter()
    first_s: list[float] = []

    async def read(prompt: list[int]) -> list[int]:
        ids: list[int] = []
        async for more in stream(prompt, num_tokens):
            if more and not ids:
                first_s.append(time.perf_counter() - began)
            ids += more
        return ids

    texts = await asyncio.gather(*map(read, prompts))
    return Answer(time.perf_counter() - began, min(first_s), texts)


def main() -> None:
    """Run until the parent closes its end."""
    model, dtype, threads, door = sys.argv[1:]
    stack = Stack(lambda service, line: print(service, line, file=sys.stderr))
    target_port, gateway_port = free_ports(2)
    target = TargetSettings(
        model=model,
        dtype=dtype,
        threads=int(threads),
        port=target_port,
        metrics_port=-1,
        drafters="",
        prefix_cache=False,
        grace_s=1.0,
    )
    gateway = GatewaySettings(
        model=model,
        port=gateway_port,
        http_port=-1,
        metrics_port=-1,
        targets=f"127.0.0.1:{target_port}",
        grace_s=1.0,
    )

    def load() -> tuple[str, Ask]:
        services = ["target"] if door == "target" else ["target", "gateway"]
        for service, settings in (("target", target), ("gateway", gateway)):
            if service in services:
                stack.start(service, settings)
        stack.wait_healthy(services)
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        address = f"127.0.0.1:{target_port if door == 'target' else gateway_port}"
        stream = from_target(address) if door == "target" else from_gateway(address)
        precision = precision_of(f"127.0.0.1:{target_port}")
        return f"outrider {precision}, {door}", lambda prompts, num_tokens: loop.run_until_complete(
            answer(stream, prompts, num_tokens)
        )

    try:
        serve(load)
    finally:
        stack.stop()


if __name__ == "__main__":
    main()
