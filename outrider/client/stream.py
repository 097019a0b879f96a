"""One answer on its way to a program, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from outrider.client.answers import Chunk
from outrider.client.errors import CallFailed, translated
from outrider.client.retries import Retries, retrying
from outrider.client.wire import chunk_from_proto
from outrider.serving.errors import Unavailable
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import inference_pb2 as pb

# Quoted: generic only for type checkers.
GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]"


class Stream:
    """One answer, piece by piece: `async for` over it, in `async with` to leave it early.

    Leaving the `async with`, `aclose` or cancelling the task that waits ends the request at the
    gateway; so does the garbage collector, in its own time. Raises OutriderError; pieces that came
    before it stand.
    """

    def __init__(
        self,
        call: Callable[[float | None], GenerateCall],
        num_choices: int,
        retries: Retries,
        timeout_s: float | None,
        tls: ClientTls | None,
    ) -> None:
        self._start = call
        self._num_open = num_choices
        self._retries = retries
        self._timeout_s = timeout_s
        self._tls = tls
        self._call: GenerateCall | None = None
        self._begun = False
        self._closed = False

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await self._next()
        except BaseException as error:
            left = self._closed
            await self.aclose()
            if left and isinstance(error, CallFailed):  # by `aclose`, while this waited
                raise StopAsyncIteration from None
            raise
        if message is None:
            self._closed = True
            raise StopAsyncIteration
        chunk = chunk_from_proto(message)
        self._num_open -= chunk.finish is not None
        return chunk

    async def aclose(self) -> None:
        """End the request, if it has not ended. What is read from now on is nothing."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        # For a program that left its loop by `break` and holds nothing of the stream any more.
        if self._call is not None:
            self._call.cancel()

    async def _next(self) -> pb.GenerateResponse | None:
        """None at the end. Only the first message may be asked for more than once."""
        if not self._begun:
            message = await retrying(self._first, self._retries, self._timeout_s, self._tls)
            self._begun = True
        else:
            assert self._call is not None
            with translated():
                message = await self._call.read()
        if isinstance(message, pb.GenerateResponse):
            return message
        if self._num_open > 0:
            raise Unavailable("the answer ended before its end")
        return None

    async def _first(self, timeout_s: float | None) -> Any:
        if self._closed:  # while this waited before it tries again
            raise CallFailed(grpc.StatusCode.CANCELLED, "the stream was closed")
        self._call = self._start(timeout_s)
        return await self._call.read()
