"""What a gateway's status means, as one of the errors in `outrider.serving.errors`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from outrider.serving.errors import (
    DeadlinePassed,
    EngineFailed,
    Incompatible,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from outrider.serving.refusals import explain_refusal
from outrider.serving.tls import ClientTls

_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    kind.code: kind
    for kind in (
        DeadlinePassed,
        EngineFailed,
        Incompatible,
        NotFound,
        TooLarge,
        Unauthenticated,
        Unavailable,
    )
}


class CallFailed(OutriderError):
    """Any other status. `code` is gRPC's."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code


@contextlib.contextmanager
def translated(tls: ClientTls | None = None) -> Iterator[None]:
    """Raises OutriderError for what gRPC raises. A cancelled task stays cancelled.

    tls: what the call used, which tells why there is no connection.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _from_rpc(error, tls) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # gRPC's word for a call that was ended on this side, by whomever.
        raise CallFailed(grpc.StatusCode.CANCELLED, "the call was ended on this side") from None


def _from_rpc(error: grpc.aio.AioRpcError, tls: ClientTls | None) -> OutriderError:
    """The error with its field or delay, where the status has one."""
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        bad_request = error_details_pb2.BadRequest()
        if _find(error, bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidRequest(violation.field, violation.description)
        return InvalidRequest("request", message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry = error_details_pb2.RetryInfo()
        if _find(error, retry):
            return Overloaded(message, retry.retry_delay.ToNanoseconds() / 1e9)
    kind = _BY_CODE.get(code)
    message = explain_refusal(message, tls) or message
    return kind(message) if kind else CallFailed(code, message)


def _find(error: grpc.aio.AioRpcError, wanted: Message) -> bool:
    """Fill `wanted` from the status's details; False if there is none of its type."""
    trailer: Iterable[tuple[str, Any]] = error.trailing_metadata()  # type: ignore[assignment]
    for key, value in trailer:
        if key == "grpc-status-details-bin":
            try:
                details = status_pb2.Status.FromString(value).details
                return any(detail.Unpack(wanted) for detail in details)
            except DecodeError:  # a proxy's, perhaps: the status itself stands
                return False
    return False
