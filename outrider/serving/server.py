"""The life of a service: load, listen, say SERVING; on a signal say NOT_SERVING, drain, free.

Knows nothing of what the service does. The first SIGTERM, SIGINT or SIGHUP drains, a second
SIGTERM or SIGINT ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import grpc
import structlog
from grpc_health.v1 import health as health_api
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from outrider.serving.admin import AdminApp, serving_admin
from outrider.serving.channel import server_options
from outrider.serving.health import Health, SetHealthy
from outrider.serving.interceptors import ErrorInterceptor
from outrider.serving.open_calls import OpenCalls
from outrider.serving.process_age import process_age_s
from outrider.serving.sockets import allow_many
from outrider.serving.tls import ServerTls, server_credentials
from outrider.serving.tls_settings import is_loopback
from outrider.serving.tracing import Tracing

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_FLUSH_S = 0.2
"""Time for the last statuses to leave, before connections are cut and health watches with them."""
_LAST_SPANS_S = 3.0
"""What a collector gets to take the last spans."""


class Service(Protocol):
    """What `serve` needs of a service."""

    service_names: Sequence[str]
    """Full protobuf names, for health and reflection."""
    registry: CollectorRegistry
    """Its metrics."""
    tls: ServerTls | None
    """Of its port; None: plain text."""

    @property
    def max_message_bytes(self) -> int:
        """Limit of its server, in both directions."""

    async def start(self, set_healthy: SetHealthy) -> None:
        """Load and warm; healthy after the return. `set_healthy` may be called later."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers."""

    async def drain(self) -> None:
        """Refuse new work and end streams that would not end by themselves."""

    async def stop(self) -> None:
        """Free everything. Called once, after the last call has ended."""


@runtime_checkable
class HttpFront(Protocol):
    """A service that clients reach over HTTP too."""

    def serving_http(
        self, health: Health, calls: OpenCalls
    ) -> contextlib.AbstractAsyncContextManager[int]:
        """Take requests while the block runs; gives the bound port, 0 for none.

        A drain waits for those that are among `calls`.
        """


class ServerSettings(Protocol):
    """What `serve` needs of a service's settings; see `settings.py`."""

    @property
    def host(self) -> str:
        """Of the gRPC port."""

    @property
    def port(self) -> int:
        """Of gRPC."""

    @property
    def grace_s(self) -> float:
        """What open calls get at the end."""

    @property
    def metrics_host(self) -> str:
        """Of the HTTP port."""

    @property
    def metrics_port(self) -> int:
        """Of metrics and probes over HTTP; -1: none."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A service that takes calls."""

    port: int
    """The bound port, which differs from the asked one if that was 0."""
    admin_port: int
    """Where metrics and probes are; 0 for nowhere."""
    http_port: int
    """Where clients are served over HTTP; 0 for nowhere."""
    server: grpc.aio.Server
    health: Health
    calls: OpenCalls


@contextlib.asynccontextmanager
async def listening(
    service: Service, host: str, port: int, admin: tuple[str, int] | None = None
) -> AsyncIterator[Listening]:
    """Start `service` and take calls. At the end open calls are cancelled and it is stopped.

    admin: where metrics and probes listen, from before the start to after the stop; None: nowhere.
    """
    # Until it says otherwise a service is healthy once it has started.
    health, calls = Health(service.service_names), OpenCalls()
    server = None
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as fronts:
        admin_port = 0
        if admin is not None:
            app = AdminApp(health, service.registry)
            admin_port = await stack.enter_async_context(serving_admin(app, *admin))
        try:
            await health.publish()
            await service.start(health.set)
            server = _make_server(service, health, calls)
            bound = _bind(server, host, port, service.tls)
            http_port = 0
            if isinstance(service, HttpFront):
                front = service.serving_http(health, calls)
                http_port = await fronts.enter_async_context(front)
            await server.start()
            health.started = True
            yield Listening(bound, admin_port, http_port, server, health, calls)
        finally:
            await fronts.aclose()
            if server is not None:
                await server.stop(0)
            await service.stop()


async def serve(service: Service, settings: ServerSettings, tracing: Tracing) -> None:
    """Run `service` until a signal.

    Raises what `start` raises, and OSError for a taken port.
    """
    imported_s = process_age_s()
    admin = (settings.metrics_host, settings.metrics_port) if settings.metrics_port >= 0 else None
    with _signals() as stop:
        try:
            async with contextlib.AsyncExitStack() as stack:
                listens = listening(service, settings.host, settings.port, admin)
                running = await _until(stack.enter_async_context(listens), stop)
                if running is None:
                    log.info("stopped while starting")
                    return
                log.info(
                    "listening",
                    host=settings.host,
                    port=running.port,
                    **({"http_port": running.http_port} if running.http_port else {}),
                    metrics_port=running.admin_port or None,
                    tls=service.tls is not None,
                    traced=tracing.enabled,
                    imported_s=round(imported_s, 2),
                    ready_s=round(process_age_s(), 2),
                )
                if service.tls is None and not is_loopback(settings.host):
                    log.warning("other machines can reach this port, and it has no TLS")
                await stop.wait()
                await _drain(service, running, settings.grace_s)
        finally:
            # The last spans end with the service, and a collector may be slow to take them.
            await asyncio.to_thread(tracing.shutdown, _LAST_SPANS_S)
    log.info("stopped")


async def _drain(service: Service, running: Listening, grace_s: float) -> None:
    log.info("draining", grace_s=grace_s)
    await running.health.drain()
    await service.drain()
    ended = await running.calls.drain(grace_s)
    if ended:
        log.warning("calls were ended at the end of the grace time", calls=ended)
    await running.server.stop(_FLUSH_S)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the coroutine that `main()` makes, a `serve`, on uvloop where there is one.

    When it returns the process ends, with status 0.
    """
    allow_many()
    try:
        import uvloop
    except ImportError:
        log.warning("uvloop is not installed, falling back to asyncio's own loop")
        asyncio.run(main())
    else:
        uvloop.run(main())
    # Nothing is left to do: Python would wait for the threads of a download, however large the
    # file, and take torch apart for seconds of the time that an orchestrator gives.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(0)


def _make_server(service: Service, health: Health, calls: OpenCalls) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(calls)],
        options=server_options(service.max_message_bytes),
    )
    service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    names = (*service.service_names, health_api.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound: int = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:  # its text speaks of gRPC's own variables, not of the cause
        raise OSError(
            f"cannot listen on {address}: the port is taken, or the address is not this machine's"
        ) from error
    return bound


async def _until(work: Coroutine[Any, Any, _T], stop: asyncio.Event) -> _T | None:
    """The result of `work`, or None if `stop` is set first."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if not stop.is_set():
            stop.set()
        elif number != signal.SIGHUP:  # which a terminal that closes may send more than once
            os._exit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
