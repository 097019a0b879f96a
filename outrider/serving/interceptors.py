"""Turns errors into gRPC statuses at one place, for unary and streaming handlers alike.

Details travel as google.rpc types (BadRequest, RetryInfo), so that clients of any language can read
the field and the delay. Handlers are coroutines or async generators, never `context.write` style.
Bytes that are no message of the method's type are the client's fault and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.serving.open_calls import SHUTTING_DOWN, OpenCalls

log = structlog.get_logger(__name__)

_Context = Any  # grpc.aio.ServicerContext: generic over both message types
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_Behaviour = TypeVar("_Behaviour", bound=Callable[..., Any])


def takes_malformed(behaviour: _Behaviour) -> _Behaviour:
    """Marks a unary request's handler that keeps account of every call.

    It is given the InvalidRequest in place of bytes that are no message, and has to raise it.
    """
    behaviour.takes_malformed = True  # type: ignore[attr-defined]
    return behaviour


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only in stubs
    """Maps OutriderError and InvalidParam to their status, and anything else to INTERNAL."""

    def __init__(self, calls: OpenCalls | None = None) -> None:
        self._calls = calls or OpenCalls()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of one call; unknown methods stay unknown."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, kind)
        if handler.response_streaming and not inspect.isasyncgenfunction(behaviour):
            return handler  # not ours: grpc's health servicer writes to its context
        wrap = _guard_stream if handler.response_streaming else _guard_unary
        return make(
            wrap(method, _checking(behaviour, handler.request_streaming), self._calls),
            request_deserializer=_never_failing(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _never_failing(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    # What is raised in here never reaches a handler: grpc makes UNKNOWN and a traceback of it.
    def call(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return InvalidRequest("request", str(error))

    return call


def _checking(behaviour: Callable[..., Any], streaming: bool) -> Callable[..., Any]:
    """`behaviour`, for requests that may have become errors on the way."""

    def call(request: Any, context: _Context) -> Any:
        if streaming:
            return behaviour(_good_ones(request), context)
        if isinstance(request, InvalidRequest) and not hasattr(behaviour, "takes_malformed"):
            raise request
        return behaviour(request, context)

    return call


async def _good_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, InvalidRequest):
            raise request
        yield request


def _guard_unary(method: str, behaviour: Callable[..., Any], calls: OpenCalls) -> Any:
    async def call(request: Any, context: _Context) -> Any:
        with calls.track():
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                await _abort_if_ending(context, calls)
                raise
            except (OutriderError, InvalidParam) as error:
                await _abort(context, error)
            except Exception as error:
                await _abort_unexpected(method, context, error)

    return call


def _guard_stream(method: str, behaviour: Callable[..., Any], calls: OpenCalls) -> Any:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        with calls.track() as open_call:
            try:
                # The inner generator must be closed here and now: its `finally` frees blocks.
                async with contextlib.aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        open_call.writing = True
                        yield response
                        open_call.writing = False
                        if calls.ending:
                            raise _shutting_down()
            except asyncio.CancelledError:
                await _abort_if_ending(context, calls)
                raise
            except (OutriderError, InvalidParam) as error:
                await _abort(context, error)
            except Exception as error:
                await _abort_unexpected(method, context, error)

    return call


async def _abort_if_ending(context: _Context, calls: OpenCalls) -> None:
    if calls.ending and not context.cancelled():
        await _abort(context, _shutting_down())


def _shutting_down() -> Unavailable:
    return Unavailable(SHUTTING_DOWN)


async def _abort(context: _Context, error: OutriderError | InvalidParam) -> None:
    if isinstance(error, InvalidParam):
        error = InvalidRequest(error.field, error.message)
    message = str(error)
    status = status_pb2.Status(
        code=getattr(code_pb2, error.code.name), message=message, details=_details(error)
    )
    trailer = ("grpc-status-details-bin", status.SerializeToString())
    await context.abort(error.code, message, trailing_metadata=(trailer,))


async def _abort_unexpected(method: str, context: _Context, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has already chosen its status
    log.error("unexpected error in a handler", method=method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__})")


def _details(error: OutriderError) -> list[any_pb2.Any]:
    packed = any_pb2.Any()
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        packed.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    else:
        return []
    return [packed]
