"""What is refused at the HTTP port before it is a request for text, and the answer to any error."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import grpc

from gateway.http.errors import Kind, error_body, error_json
from outrider.params import InvalidParam
from outrider.serving.errors import OutriderError

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers with names in lower case, and body."""


class HttpRefusal(OutriderError):
    """What HTTP has a status of its own for, and the core has none."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        """The status in words. The message may quote what was sent."""
        return HTTPStatus(self.status).phrase


def answer_to(error: OutriderError | InvalidParam) -> Answer:
    """What a client gets for an error."""
    if not isinstance(error, HttpRefusal):
        return error_body(error)
    kind = Kind(error.status, _type(error.status), HTTPStatus(error.status).name.lower())
    headers = {"content-type": "application/json"} | error.headers
    return error.status, headers, error_json(str(error), kind)


def _type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
