"""The Inference service: the gRPC door of the gateway. What it does is in `inference.py`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from gateway.caller import Attributes, Door
from gateway.inference import Inference
from outrider.serving.errors import InvalidRequest, OutriderError
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


class GrpcCaller:
    """A client of the gRPC port."""

    door: Door = "grpc"
    request_id = ""

    def __init__(self, method: str, context: _Context, unread: UnreadStreams) -> None:
        """method: its full name, without a leading slash."""
        self.name = method
        self._context = context
        self._unread = unread

    def header(self, name: str) -> str | None:
        """Metadata that is text. A name that was sent twice counts once: the last."""
        for key, value in reversed(self.headers()):
            if key == name:
                return value if isinstance(value, str) else None
        return None

    def headers(self) -> Sequence[tuple[str, str | bytes]]:
        """The call's metadata."""
        return self._context.invocation_metadata() or ()

    def time_remaining(self) -> float | None:
        """The call's deadline."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Also for a handler that is stuck in a yield."""
        self._context.add_done_callback(callback)

    def writing(
        self, on_stall: Callable[[OutriderError], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Put this around a handler's `yield`."""
        return self._unread.writing(self._context, on_stall)

    def span_attributes(self) -> Attributes:
        """Of the conventions for RPC."""
        return {"rpc.system.name": "grpc", "rpc.method": self.name}

    def result_attributes(self, code: grpc.StatusCode, error: BaseException | None) -> Attributes:
        """Of the conventions for RPC."""
        return {"rpc.response.status_code": code.name}
