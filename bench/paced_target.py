"""A target without a model for measuring the gateway: tokens at a steady pace, and when each went.

Every request gets one token each `--interval-ms` up to its max_tokens; one whose id begins with
"idle" gets one token and then nothing. When a stream ends, a line goes to the file of times:
[request id, when the request came, [when each token went]], in nanoseconds of the clock that all
processes of a machine share. Prints its port once it listens.

    python -m bench.paced_target FOLDER IDS TIMES --interval-ms 50
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, TextIO

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.engine.fingerprints import token_table_hash
from outrider.serving.channel import server_options
from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc

_Context = Any  # grpc.aio.ServicerContext: generic over both message types
IDLE = "idle"
"""How the ids of requests begin that are to stand still."""


class PacedTarget(target_pb2_grpc.TargetServicer):
    """The servicer."""

    def __init__(
        self,
        status: target_pb2.TargetGetStatusResponse,
        ids: Iterable[int],
        times: TextIO,
        interval_s: float,
    ) -> None:
        """ids: told again and again, as long as a request asks."""
        self._status = status
        self._ids = tuple(ids)
        self._times = times
        self._interval_s = interval_s

    async def Generate(
        self, request: target_pb2.TokenRequest, context: _Context
    ) -> AsyncIterator[target_pb2.TokenChunk]:
        """One token a chunk, each at its time, whenever the one before was taken."""
        received_ns = time.monotonic_ns()
        sent_ns: list[int] = []
        num_tokens = request.stopping.max_tokens
        for index, token_id in zip(range(num_tokens), itertools.cycle(self._ids), strict=False):
            due_s = received_ns / 1e9 + self._interval_s * (index + 1)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            chunk = target_pb2.TokenChunk(
                first_index=index, tokens=[sampling_pb2.GeneratedToken(id=token_id)]
            )
            if index + 1 == num_tokens:
                usage = sampling_pb2.Usage(
                    prompt_tokens=len(request.token_ids), completion_tokens=num_tokens
                )
                chunk.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
                chunk.finish.usage.CopyFrom(usage)
                # Now: whoever has the last token may look for the times.
                sent_ns.append(time.monotonic_ns())
                self._times.write(json.dumps([request.request_id, received_ns, sent_ns]) + "\n")
                self._times.flush()
            else:
                sent_ns.append(time.monotonic_ns())
            yield chunk
            if request.request_id.startswith(IDLE):
                await asyncio.Event().wait()

    async def GetStatus(
        self, request: target_pb2.TargetGetStatusRequest, context: _Context
    ) -> target_pb2.TargetGetStatusResponse:
        """What a gateway asks of a target."""
        return self._status


async def serve(folder: Path, ids: list[int], times: Path, interval_s: float) -> None:
    """Until the process is ended."""
    config = json.loads((folder / "config.json").read_text())
    status = target_pb2.TargetGetStatusResponse(
        model=folder.name,
        token_table_hash=token_table_hash(folder),
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        state="serving",
        instance_id="paced",
    )
    server = grpc.aio.server(options=server_options())
    states = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    with times.open("a") as file:
        target_pb2_grpc.add_TargetServicer_to_server(
            PacedTarget(status, ids, file, interval_s), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        name = target_pb2.DESCRIPTOR.services_by_name["Target"].full_name
        await states.set(name, health_pb2.HealthCheckResponse.SERVING)
        print(port, flush=True)
        gc.disable()  # its pauses are not the gateway's
        await server.wait_for_termination()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids", help="comma-separated")
    parser.add_argument("times", type=Path)
    parser.add_argument("--interval-ms", type=float, default=50.0)
    args = parser.parse_args()
    ids = [int(each) for each in args.ids.split(",")]
    uvloop.run(serve(args.folder, ids, args.times, args.interval_ms / 1e3))


if __name__ == "__main__":
    main()
