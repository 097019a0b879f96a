"""Errors as OpenAI's API words them: a status, the field at fault, and when to come back.

The core names fields as its messages have them; here they get the names of the JSON.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import grpc

from gateway.http.answer_schema import Error
from gateway.http.json_body import BODY
from gateway.http.json_out import to_json
from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest, NotFound, OutriderError, Overloaded, TooLarge

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNAVAILABLE_RETRY_S = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """What a status says of itself."""

    status: int
    type: str
    code: str | None = None


INTERNAL = Kind(500, _SERVER, "internal_error")
TOO_LARGE = Kind(413, _INVALID, "request_too_large")
_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: Kind(400, _INVALID),
    grpc.StatusCode.OUT_OF_RANGE: Kind(400, _INVALID),
    grpc.StatusCode.UNAUTHENTICATED: Kind(401, _INVALID, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: Kind(403, _INVALID, "permission_denied"),
    grpc.StatusCode.NOT_FOUND: Kind(404, _INVALID, "not_found"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: Kind(499, _INVALID, "cancelled"),
    grpc.StatusCode.UNIMPLEMENTED: Kind(501, _SERVER, "not_implemented"),
    grpc.StatusCode.UNAVAILABLE: Kind(503, _SERVER, "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: Kind(504, _SERVER, "timeout"),
}
_MODEL_NOT_FOUND = Kind(404, _INVALID, "model_not_found")

# The longest names first.
_FIELDS = {
    "stopping.include_stop": "include_stop_str_in_output",
    "stopping.": "",
    "sampling.": "",
    "chat.messages": "messages",
    "chat": "messages",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "text": "prompt",
    "input": "prompt",
}
_FIELD = re.compile("|".join(re.escape(name) for name in _FIELDS))
_WHOLE_FIELD_ENDS = ("", ".", "[")


def error_body(error: OutriderError | InvalidParam) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the answer to a request that failed.

    The body is on one line, so that it can also be the data of a stream's last event.
    """
    param, message = None, str(error)
    if isinstance(error, InvalidRequest | InvalidParam):
        field = json_field(error.field)
        message = f"{field}: {error.message}"
        param = None if field == BODY else field
    elif isinstance(error, NotFound):
        param = "model"  # what a request can name
    kind = _kind(error)
    headers = {"content-type": "application/json"}
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif kind.status == 503:
        headers["retry-after"] = str(_UNAVAILABLE_RETRY_S)
    return kind.status, headers, error_json(message, kind, param)


def status_of(code: grpc.StatusCode) -> int:
    """The HTTP status for a gRPC one."""
    return 200 if code is grpc.StatusCode.OK else _KINDS.get(code, INTERNAL).status


def error_json(message: str, kind: Kind, param: str | None = None) -> bytes:
    """The body alone, for what only this door can find wrong."""
    error: Error = {
        "error": {"message": message, "type": kind.type, "param": param, "code": kind.code}
    }
    return to_json(error)


def json_field(field: str) -> str:
    """The JSON's name of a field of the core's messages; others are left as they are."""
    match = _FIELD.match(field)
    if match is None:
        return field
    rest = field[match.end() :]
    if not match[0].endswith(".") and rest[:1] not in _WHOLE_FIELD_ENDS:
        return field  # a longer name that begins alike
    return _FIELDS[match[0]] + rest


def _kind(error: OutriderError | InvalidParam) -> Kind:
    if isinstance(error, InvalidParam):
        return _KINDS[grpc.StatusCode.INVALID_ARGUMENT]
    if isinstance(error, NotFound):
        return _MODEL_NOT_FOUND
    if isinstance(error, TooLarge):
        return TOO_LARGE
    return _KINDS.get(error.code, INTERNAL)
