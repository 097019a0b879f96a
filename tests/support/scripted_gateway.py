"""A gateway that answers every request with the same two chunks, or with an error.

For tests of what asks a gateway. Knows nothing of targets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2

WAIT_S = 15.0


class ScriptedGateway(inference_pb2_grpc.InferenceServicer):
    """Remembers the requests; "Good " is plain, "morning" holds a drafted token."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.error: grpc.StatusCode | None = None
        self.hang = False
        """Send nothing behind the first chunk."""
        self.cancelled = threading.Event()
        self.address = ""

    @property
    def request(self) -> pb.GenerateRequest:
        """The last one."""
        return self.requests[-1]

    def Generate(self, request, context):
        """Play the script."""
        self.requests.append(request)
        if self.error is not None:
            context.abort(self.error, "as scripted")
        ended = threading.Event()
        context.add_callback(ended.set)
        plain = sampling_pb2.GeneratedToken(id=5)
        drafted = sampling_pb2.GeneratedToken(id=6, drafted=True, logprob=-0.5)
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="Good ", tokens=[plain]))
        if self.hang:
            if ended.wait(WAIT_S):
                self.cancelled.set()
            return
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="morning", tokens=[drafted]))
        stats = sampling_pb2.SpeculationStats(rounds=1, drafted=2, accepted=1)
        yield pb.GenerateResponse(
            finish=pb.GenerateFinish(
                reason=sampling_pb2.FINISH_REASON_STOP,
                usage=sampling_pb2.Usage(prompt_tokens=3, completion_tokens=2),
                seed=7,
                speculation=stats,
            )
        )


@contextmanager
def scripted_gateway() -> Iterator[ScriptedGateway]:
    """One on a port of loopback."""
    script = ScriptedGateway()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    script.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield script
    finally:
        server.stop(0).wait(5)
