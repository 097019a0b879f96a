"""One `Speculate` stream from the target's end: its handshake, its two directions, why it ended.

Knows nothing of sequences or of connecting again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc

from outrider.serving.errors import Incompatible
from outrider.serving.handshake import check_compatible
from protos.outrider.v1 import draft_pb2

LISTEN_S = (0.05, 1.0)
"""How long to listen for a refusal before the first write, at first and when that was too short."""

_TIMEOUT_S = 5.0
_HIDDEN_STATUS = "Internal error from Core"
"""What grpc puts in the place of a stream's status when a write meets its end."""
_WRITE_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What a write raises when the stream is over."""
_PERMANENT = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}

Stream = grpc.aio.StreamStreamCall[draft_pb2.SpeculateRequest, draft_pb2.SpeculateResponse]


async def shake_hands(stream: Stream, ours: draft_pb2.Hello, listen_s: float) -> draft_pb2.Hello:
    """The drafter's Hello. Raises Incompatible, TimeoutError, ValueError or AioRpcError."""
    async with asyncio.timeout(_TIMEOUT_S):
        reader = asyncio.create_task(_read_one(stream))
        try:
            # A write that meets a refusal hides its status, so a refusal may come first.
            await asyncio.wait({reader}, timeout=listen_s)
            if not reader.done():
                with contextlib.suppress(*_WRITE_ERRORS):
                    await stream.write(draft_pb2.SpeculateRequest(hello=ours))
            answer = await reader
        finally:
            reader.cancel()
    if answer is None:
        code = await stream.code()
        raise Incompatible(f"{code.name}: {await stream.details() or 'no Hello'}")
    if not answer.HasField("hello"):
        raise ValueError("the drafter's first frame is not a Hello")
    check_compatible(ours, answer.hello)
    return answer.hello


async def pump(
    stream: Stream,
    frames: AsyncIterator[draft_pb2.SpeculateRequest],
    take_in: Callable[[draft_pb2.SpeculateResponse], None],
) -> None:
    """Write and read until the drafter ends the stream with OK; raises whatever else ends it."""
    writer = asyncio.create_task(_write(stream, frames))
    reader = asyncio.create_task(_read(stream, take_in))
    try:
        await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        if writer.done() and not isinstance(writer.exception(), _WRITE_ERRORS):
            writer.result()
        # The reader knows the status; a writer that failed first only saw the stream close.
        async with asyncio.timeout(_TIMEOUT_S):
            await reader
    finally:
        for task in (writer, reader):
            task.cancel()
        await asyncio.gather(writer, reader, return_exceptions=True)


def explain(error: Exception) -> tuple[str, bool]:
    """Why a stream ended, in words, and whether trying again at once is in vain."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}", error.code() in _PERMANENT
    return str(error) or type(error).__name__, isinstance(error, Incompatible)


def hides_status(error: Exception) -> bool:
    """The true status was lost to a write that came too early."""
    return isinstance(error, grpc.aio.AioRpcError) and error.details() == _HIDDEN_STATUS


async def _write(stream: Stream, frames: AsyncIterator[draft_pb2.SpeculateRequest]) -> None:
    async for frame in frames:
        await stream.write(frame)


async def _read(stream: Stream, take_in: Callable[[draft_pb2.SpeculateResponse], None]) -> None:
    while (response := await _read_one(stream)) is not None:
        take_in(response)
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        raise ValueError(f"{code.name}: {await stream.details()}")


async def _read_one(stream: Stream) -> draft_pb2.SpeculateResponse | None:
    """The next frame, or None at the end of the stream."""
    response = await stream.read()
    if response is None:  # what grpc makes of bytes that it cannot parse
        raise ValueError("the drafter sent bytes that are no message")
    return response if isinstance(response, draft_pb2.SpeculateResponse) else None
