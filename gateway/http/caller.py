"""A client of the HTTP port, as the core sees whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from opentelemetry.util.types import AttributeValue

from gateway.caller import Attributes
from gateway.http.connection import CONNECTION, Connection
from gateway.http.errors import status_of
from outrider.params import MAX_REQUEST_ID_BYTES
from outrider.serving.errors import InvalidRequest, OutriderError, Unavailable

TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")

_Scope = dict[str, Any]


class HttpCaller:
    """One request over HTTP, from the end of its head to the end of its answer."""

    def __init__(self, route: str, scope: _Scope, stall_s: float) -> None:
        """route: the path it was found by, from a fixed set."""
        self.name = f"{scope['method']} {route}"
        self.connection: Connection = scope["state"][CONNECTION]
        self.request_id: str = scope["state"].setdefault("request_id", "")
        self.left = False
        """The client is gone, or was given up."""
        self.status: int | None = None
        """Of the answer, once that has begun."""
        self.invalid: InvalidRequest | None = None
        """What is wrong with the headers."""
        self._route = route
        self._scope = scope
        self._stall_s = stall_s
        self._callbacks: list[Callable[[object], None]] = []
        self._end_s: float | None = None
