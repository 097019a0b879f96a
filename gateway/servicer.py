"""The Inference service: the gRPC door of the gateway. What it does is in `inference.py`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from gateway.caller import GrpcCaller
from gateway.inference import Inference
from outrider.serving.errors import InvalidRequest
from outrider.serving.interceptors import takes_malformed
from outrider.serving.unread import UnreadStreams
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

_Context = Any  # grpc.aio.ServicerContext: generic over both message types
_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """All four methods."""

    def __init__(self, inference: Inference, unread: UnreadStreams) -> None:
        self._inference = inference
        self._unread = unread

    @takes_malformed
    async def Generate(
        self, request: pb.GenerateRequest | InvalidRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one answer, or several side by side."""
        caller = self._caller("Generate", context)
        async with contextlib.aclosing(self._inference.generate(request, caller)) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Ids as Generate would see them."""
        return await self._inference.tokenize(request, self._caller("Tokenize", context))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: _Context
    ) -> pb.DetokenizeResponse:
        """The text of ids, all at once."""
        return await self._inference.detokenize(request, self._caller("Detokenize", context))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """The one model, and whether it can be asked now."""
        return self._inference.list_models(self._caller("ListModels", context))

    def _caller(self, method: str, context: _Context) -> GrpcCaller:
        return GrpcCaller(f"{_SERVICE}/{method}", context, self._unread)
