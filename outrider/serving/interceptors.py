"""Turns errors into gRPC statuses at one place, for unary and streaming handlers alike.

Details travel as google.rpc types (BadRequest, RetryInfo), so that clients of any language can read
the field and the delay. Handlers are coroutines or async generators, never `context.write` style.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest, OutriderError, Overloaded

log = structlog.get_logger(__name__)

_Context = Any  # grpc.aio.ServicerContext: generic over both message types
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only in stubs
    """Maps OutriderError and InvalidParam to their status, and anything else to INTERNAL."""

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
            wrap(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guard_unary(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await behaviour(request, context)
        except (OutriderError, InvalidParam) as error:
            await _abort(context, error)
        except Exception as error:
            await _abort_unexpected(method, context, error)

    return call


def _guard_stream(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            # The inner generator must be closed here and now: its `finally` frees blocks.
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except (OutriderError, InvalidParam) as error:
            await _abort(context, error)
        except Exception as error:
            await _abort_unexpected(method, context, error)

    return call


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
