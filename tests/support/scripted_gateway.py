"""A gateway that answers every request with the same two chunks a choice, or with an error.

For tests of what asks a gateway. Knows nothing of targets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from outrider.serving.tls import ServerTls, server_credentials
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2

WAIT_S = 15.0


class ScriptedGateway(inference_pb2_grpc.InferenceServicer):
    """Remembers the requests; "Good " is plain, "morning" holds a drafted token.

    Choices come side by side. Log-probabilities come where they are asked for, whatever their
    number; the prompt has two tokens.
    """

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[str | None] = []
        """The authorization of every call."""
        self.words = ("Good ", "morning")
        self.unused: dict[str, int] = {}
        """Proposed tokens of each choice that no step verified, by reason."""
        self.error: grpc.StatusCode | None = None
        self.details = "as scripted"
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
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        if self.error is not None:
            context.abort(self.error, self.details)
        ended = threading.Event()
        context.add_callback(ended.set)
        num_choices = request.n or 1
        for index in range(num_choices):
            yield pb.GenerateResponse(chunk=_first_chunk(request, index, self.words[0]))
        if self.hang:
            if ended.wait(WAIT_S):
                self.cancelled.set()
            return
        drafted = sampling_pb2.GeneratedToken(id=6, drafted=True)
        if request.HasField("logprobs"):
            drafted.logprob = -0.5
        for index in range(num_choices):
            chunk = pb.GenerateChunk(index=index, text=self.words[1], tokens=[drafted])
            yield pb.GenerateResponse(chunk=chunk)
        stats = sampling_pb2.SpeculationStats(rounds=1, drafted=2, accepted=1, unused=self.unused)
        for index in reversed(range(num_choices)):
            yield pb.GenerateResponse(
                finish=pb.GenerateFinish(
                    index=index,
                    reason=sampling_pb2.FINISH_REASON_STOP,
                    usage=sampling_pb2.Usage(prompt_tokens=3, completion_tokens=2),
                    seed=7,
                    speculation=stats,
                )
            )

    def Detokenize(self, request, context):
        """`<5>` for the id 5."""
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return pb.DetokenizeResponse(text="".join(f"<{each}>" for each in request.ids))


def _first_chunk(request: pb.GenerateRequest, index: int, text: str) -> pb.GenerateChunk:
    token = sampling_pb2.GeneratedToken(id=5)
    if request.HasField("logprobs"):
        token.logprob = -0.25
        token.top.add(id=8, logprob=-0.125)
    chunk = pb.GenerateChunk(index=index, text=text, tokens=[token])
    if request.HasField("prompt_logprobs") and index == 0:
        chunk.prompt_tokens.add(id=3)
        chunk.prompt_tokens.add(id=4, logprob=-2.0).top.add(id=9, logprob=-1.0)
    return chunk


@contextmanager
def scripted_gateway(tls: ServerTls | None = None) -> Iterator[ScriptedGateway]:
    """One on a port of loopback."""
    script = ScriptedGateway()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(script, server)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    script.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield script
    finally:
        server.stop(0).wait(5)
