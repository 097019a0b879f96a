"""A client of the HTTP port, as the core sees whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
from starlette.types import Scope

from gateway.caller import Attributes, Door
from gateway.http.connection import CONNECTION, Connection
from gateway.http.errors import status_of
from gateway.http.refusals import answer_to
from outrider.params import MAX_REQUEST_ID_BYTES, InvalidParam
from outrider.serving.errors import InvalidRequest, OutriderError, Unavailable

MAX_TIMEOUT_S = 604_800
"""A week. What is longer is a mistake, of milliseconds say."""
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_BYTES}}}")


class HttpCaller:
    """One request over HTTP, from the end of its head to the end of its answer."""

    door: Door = "http"

    def __init__(self, scope: Scope, stall_s: float) -> None:
        """stall_s: see `writing`."""
        self.name = self.route = ""
        """The path in our own words, from a fixed set, and the method before it."""
        self.parameters: Mapping[str, str] = {}
        """The parts of the path that the route leaves open."""
        self.connection: Connection = scope["state"][CONNECTION]
        self.left = False
        """The client is gone, or was given up."""
        self.status: int | None = None
        """Of the answer, once that has begun."""
        self.invalid: InvalidRequest | None = None
        """The first header that is not as it must be."""
        self._method: str = scope["method"]
        self._scheme: str = scope["scheme"]
        self._headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        self._stall_s = stall_s
        self._callbacks: list[Callable[[object], None]] = []
        self._end_s = self._deadline()
        self.request_id = self._request_id()
        """The client's name for the request, or one that was made here."""

    def found(self, route: str, parameters: Mapping[str, str]) -> None:
        """The path leads somewhere."""
        self.name, self.route = f"{self._method} {route}", route
        self.parameters = parameters

    def header(self, name: str) -> str | None:
        """A header that was sent twice counts once: the last."""
        return next((value for key, value in reversed(self._headers) if key == name), None)

    def headers(self) -> Sequence[tuple[str, str | bytes]]:
        """All, with their names in lower case."""
        return self._headers

    def time_remaining(self) -> float | None:
        """Of the seconds that `X-Request-Timeout` has named."""
        if self._end_s is None:
            return None
        return max(0.0, self._end_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Called by `over`."""
        self._callbacks.append(callback)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the block runs a client that leaves cancels the current task.

        Behind it the call is over.
        """
        task = asyncio.current_task()
        assert task is not None

        def on_lost() -> None:
            self.left = True
            task.cancel()

        try:
            with self.connection.watched(on_lost):
                yield
        finally:
            for callback in self._callbacks:
                callback(self)

    @contextlib.contextmanager
    def writing(self, on_stall: Callable[[OutriderError], None]) -> Iterator[None]:
        """Cuts the connection of a client that does not take a message in time."""
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._give_up, on_stall)
        try:
            yield
        finally:
            timer.cancel()

    def span_attributes(self) -> Attributes:
        """Of the conventions for HTTP."""
        return {
            "http.request.method": self._method,
            "http.route": self.route,
            "url.path": self.route,  # the same: the routes of requests have no parameters
            "url.scheme": self._scheme,
        }

    def result_attributes(self, code: grpc.StatusCode, error: BaseException | None) -> Attributes:
        """Of the conventions for HTTP. There is no status if the client left before it had one."""
        status = self.status
        if status is None and not self.left:  # the answer is still to come
            if isinstance(error, OutriderError | InvalidParam):
                status = answer_to(error)[0]
            else:
                status = status_of(code)
        return {"http.response.status_code": status} if status else {}

    def _give_up(self, on_stall: Callable[[OutriderError], None]) -> None:
        on_stall(Unavailable(f"the answer was not read for {self._stall_s:g} s"))
        self.connection.abort()

    def _deadline(self) -> float | None:
        given = self.header("x-request-timeout")
        if given is None:
            return None
        if not _SECONDS.fullmatch(given) or not 0 < float(given) <= MAX_TIMEOUT_S:
            self._note(
                "X-Request-Timeout",
                f"must be seconds above 0 and at most {MAX_TIMEOUT_S}, got {given[:40]!r}",
            )
            return None
        return asyncio.get_running_loop().time() + float(given)

    def _request_id(self) -> str:
        given = self.header("x-request-id")
        if given and _REQUEST_ID.fullmatch(given):
            return given
        if given:
            self._note(
                "X-Request-Id",
                f"must be at most {MAX_REQUEST_ID_BYTES} printable characters of ASCII without "
                "spaces",
            )
        return uuid.uuid4().hex

    def _note(self, header: str, message: str) -> None:
        self.invalid = self.invalid or InvalidRequest(header, message)
