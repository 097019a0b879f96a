"""A gateway that plays what a test gives it: for each call messages, then an end or an error.

For tests of a client that asks again. Knows nothing of targets and tokenizers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc

from outrider.serving.channel import server_options
from outrider.serving.interceptors import ErrorInterceptor
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2


class PlayedGateway(inference_pb2_grpc.InferenceServicer):
    """Each call takes the next of `plays`; the last one is for all that follow."""

    def __init__(self, plays: Sequence[Sequence[pb.GenerateResponse | Exception]]) -> None:
        self.plays = plays
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.time_remaining_s: list[float | None] = []
        self.address = ""

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The next play."""
        play = self._next(request, context)
        for each in play:
            if isinstance(each, Exception):
                raise each
            yield each

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """No model, or the first error of the next play."""
        for each in self._next(request, context):
            if isinstance(each, Exception):
                raise each
        return pb.ListModelsResponse()

    def _next(self, request, context):
        play = self.plays[min(len(self.requests), len(self.plays) - 1)]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_remaining_s.append(context.time_remaining())
        return play


def chunk(text: str, index: int = 0, token_id: int = 5) -> pb.GenerateResponse:
    """A piece with one token."""
    token = sampling_pb2.GeneratedToken(id=token_id)
    return pb.GenerateResponse(chunk=pb.GenerateChunk(index=index, text=text, tokens=[token]))


def finish(index: int = 0) -> pb.GenerateResponse:
    """The end of a choice."""
    return pb.GenerateResponse(
        finish=pb.GenerateFinish(index=index, reason=sampling_pb2.FINISH_REASON_STOP, seed=7)
    )


@contextlib.asynccontextmanager
async def played_gateway(
    *plays: Sequence[pb.GenerateResponse | Exception], port: int = 0
) -> AsyncIterator[PlayedGateway]:
    """One on a loopback port."""
    gateway = PlayedGateway(plays)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options())
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    gateway.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield gateway
    finally:
        await asyncio.shield(server.stop(0))
