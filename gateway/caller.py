"""Who asks, over whatever door: what the core of the gateway needs to know of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import grpc
from opentelemetry.util.types import AttributeValue

from outrider.serving.errors import OutriderError

Attributes = dict[str, AttributeValue]
Door = Literal["grpc", "http"]
DOORS: Sequence[Door] = ("grpc", "http")


class Caller(Protocol):
    """One call of a client, from its arrival to its end."""

    name: str
    """Of what is called, from a fixed set; the name of the span of a call that is no request."""
    door: Door
    """Where it came in."""
    request_id: str
    """What the client knows the call by, if not by its message's `request_id`; else empty."""

    def header(self, name: str) -> str | None:
        """What was sent under this lower-case name."""

    def headers(self) -> Sequence[tuple[str, str | bytes]]:
        """Everything that was sent beside the request."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's own deadline; None: it has none."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """`callback` is called when the call is over, however it ended."""

    def writing(
        self, on_stall: Callable[[OutriderError], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Put this around the delivery of one message.

        If the client does not take it in time, `on_stall` is called with the error that ends the
        call.
        """

    def span_attributes(self) -> Attributes:
        """The door's own, at the beginning."""

    def result_attributes(self, code: grpc.StatusCode, error: BaseException | None) -> Attributes:
        """The door's own, at the end; `code` is how the request ended, `error` what ended it."""
