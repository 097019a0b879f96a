"""Plain HTTP for those who watch a service: `/metrics`, `/healthz` (alive), `/readyz` (ready).

It runs on the service's own event loop and is there before the model is: a probe sees "starting",
not a refused connection. It is for the operator's network; clients have no business here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.serving.health import Health
from outrider.serving.http_config import http_config
from outrider.serving.sockets import bind

log = structlog.get_logger(__name__)

_PLAIN = "text/plain; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"
_CLOSING_S = 1
"""What the answers that are being written get at the end."""
_CONNECTION_S = 10.0
"""What a connection gets from its beginning to the end of its one answer."""
_MOST_CONNECTIONS = 64
"""Each holds a file descriptor, without which gRPC would accept nobody either."""

_Scope = dict[str, Any]
_Send = Callable[[_Scope], Awaitable[None]]
_Answer = tuple[int, str, bytes]


class AdminApp:
    """The three pages, as an ASGI application."""

    def __init__(self, health: Health, registry: CollectorRegistry) -> None:
        self._health = health
        self._registry = registry

    async def __call__(self, scope: _Scope, receive: object, send: _Send) -> None:
        """One request."""
        status, kind, body = self._answer(scope)
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})

    def _answer(self, scope: _Scope) -> _Answer:
        if scope["path"] not in ("/metrics", "/healthz", "/readyz"):
            return 404, _PLAIN, b"there are /metrics, /healthz and /readyz\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, _PLAIN, b"only GET\n"
        if scope["path"] == "/metrics":
            return self._metrics(scope)
        good = self._health.alive if scope["path"] == "/healthz" else self._health.ready
        return (200 if good else 503), _PLAIN, f"{self._health.state}\n".encode()

    def _metrics(self, scope: _Scope) -> _Answer:
        accepted = b",".join(value for key, value in scope["headers"] if key == b"accept")
        try:
            open_metrics = _takes_open_metrics(accepted.decode("latin-1"))
            encode, kind = choose_encoder(_OPEN_METRICS if open_metrics else "")
            return 200, kind, encode(self._registry)
        except Exception as error:  # a fault in a metric must neither end the page nor hide
            log.error("metrics could not be read", exc_info=error)
            return 500, _PLAIN, b"the metrics could not be read; the log says why\n"


def _takes_open_metrics(accepted: str) -> bool:
    """In the version that there is here. What is not understood is passed over."""
    for each in accepted.split(","):
        kind, *parameters = (part.strip().lower() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        if kind == _OPEN_METRICS and versions in ([], ["version=1.0.0"]):
            return True
    return False


class _Connection(H11Protocol):
    """Ends after a while, whatever the client does. uvicorn's own timer begins behind an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new one takes the place of the oldest, so that those who never end cost no probe."""
        super().connection_made(transport)
        self._end = self.loop.call_later(_CONNECTION_S, transport.abort)
        if len(self.connections) > _MOST_CONNECTIONS:
            others = [each for each in self.connections - {self} if isinstance(each, _Connection)]
            min(others, key=lambda each: each._end.when()).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """With it goes its timer."""
        self._end.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `server.py`'s."""
        yield


@contextlib.asynccontextmanager
async def serving_admin(app: AdminApp, host: str, port: int) -> AsyncIterator[int]:
    """Answer while the block runs; gives the bound port. Raises OSError for a taken one."""
    bound = bind(host, port, "metrics", "metrics_port")
    bound.listen()  # now, so that a port that is taken shows here
    config = http_config(app, _Connection, timeout_graceful_shutdown=_CLOSING_S)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]), name="admin")
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
