"""Metrics and probes over HTTP: there before the model is, right at every moment, harmless."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.cli.demo import free_ports
from outrider.serving import admin
from outrider.serving.health import SetHealthy
from outrider.serving.metrics import SECONDS_BUCKETS, Snapshot, make_registry
from outrider.serving.server import listening
from outrider.serving.tracing import Tracing

HOST = "127.0.0.1"


class Slow:
    """A service that starts when the test says so."""

    service_names = ("outrider.v1.Target",)
    max_message_bytes = 1 << 20
    tls = None

    def __init__(self) -> None:
        self.registry: CollectorRegistry = make_registry("target", Tracing.disabled())
        self.loaded = asyncio.Event()
        self.set_healthy: SetHealthy | None = None

    async def start(self, set_healthy: SetHealthy) -> None:
        self.set_healthy = set_healthy
        await self.loaded.wait()

    def register(self, server: grpc.aio.Server) -> None:
        """Nothing to add."""

    async def drain(self) -> None:
        """Nothing to end."""

    async def stop(self) -> None:
        """Nothing to free."""


async def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    """(status, content type, body) of a GET."""

    def ask() -> tuple[int, str, str]:
        request = urllib.request.Request(f"http://{HOST}:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.headers["content-type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["content-type"], error.read().decode()

    return await asyncio.to_thread(ask)


@contextlib.asynccontextmanager
async def running(service: Slow) -> AsyncIterator[int]:
    """The admin port of a service that has started."""
    service.loaded.set()
    async with listening(service, HOST, 0, (HOST, 0)) as listens:
        yield listens.admin_port


async def test_probes_follow_the_life_of_a_service() -> None:
    """Starting: alive and not ready; then ready; then as it says; draining: alive, not ready."""
    service, (port,) = Slow(), free_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        entering = asyncio.create_task(
            stack.enter_async_context(listening(service, HOST, 0, (HOST, port)))
        )
        while service.set_healthy is None:
            await asyncio.sleep(0.005)
        assert (await get(port, "/readyz"))[::2] == (503, "starting\n")
        assert (await get(port, "/healthz"))[::2] == (200, "starting\n")
        assert (await get(port, "/metrics"))[0] == 200
        service.loaded.set()
        listens = await entering
        assert listens.admin_port == port
        assert (await get(port, "/readyz"))[::2] == (200, "ready\n")
        service.set_healthy(False)
        assert (await get(port, "/readyz"))[::2] == (503, "unready\n")
        assert (await get(port, "/healthz"))[0] == 200
        service.set_healthy(True)
        await listens.health.drain()
        assert (await get(port, "/readyz"))[::2] == (503, "draining\n")
        assert (await get(port, "/healthz"))[0] == 200
        service.set_healthy(False, alive=False)
        assert (await get(port, "/readyz"))[0] == 503
        assert (await get(port, "/healthz"))[::2] == (503, "dead\n")
    with pytest.raises(urllib.error.URLError):
        await get(port, "/healthz")


async def test_a_scrape_has_what_every_service_shows() -> None:
    """Version, process, Python, lost spans; with no time of creation beside each."""
    service = Slow()
    requests = Counter("outrider_requests", "…", registry=service.registry)
    seconds = Histogram("outrider_s", "…", buckets=SECONDS_BUCKETS, registry=service.registry)
    requests.inc()
    seconds.observe(0.02)
    async with running(service) as port:
        _, kind, body = await get(port, "/metrics")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(body)}
    (build,) = families["outrider_build_info"].samples
    assert build.labels["service"] == "target"
    assert build.labels["version"]
    assert families["outrider_spans_dropped"].samples[0].value == 0
    assert families["outrider_requests"].samples[0].value == 1
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= set(families)
    assert "_created" not in body


async def test_open_metrics_for_who_asks() -> None:
    """As newer scrapers do."""
    async with running(Slow()) as port:
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        status, kind, body = await get(port, "/metrics", Accept=accept)
    assert status == 200
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith("# EOF\n")


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain;version=zz",
        "application/openmetrics-text; version=abc",
        "application/openmetrics-text; version=9.9.9",
        "text/plain; version=" + "1" * 5000,
        "application/openmetrics-text;version=1.0.0\xff",
        ",;=,;;version=",
    ],
)
async def test_what_cannot_be_had_or_understood_gets_the_plain_format(accept: str) -> None:
    """Whatever a client says it takes; the type is what the body is, and not what was asked."""
    async with running(Slow()) as port:
        status, kind, body = await get(port, "/metrics", Accept=accept)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "# EOF" not in body


async def test_other_paths_and_methods_are_refused() -> None:
    """404 and 405, and a HEAD without a body."""
    async with running(Slow()) as port:
        assert (await get(port, "/"))[0] == 404
        assert (await get(port, "/metrics/../etc"))[0] == 404
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert b" 405 " in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"HEAD /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.read()
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        writer.close()


async def test_a_fault_in_a_metric_shows_and_harms_nothing_else() -> None:
    """A scrape fails, as `up == 0` shows; probes go on, and the next scrape may be good."""
    service, good = Slow(), False

    def families() -> Iterable[Metric]:
        if not good:
            raise ZeroDivisionError
        return [GaugeMetricFamily("outrider_x", "…", 7)]

    service.registry.register(Snapshot(families))
    async with running(service) as port:
        assert (await get(port, "/metrics"))[0] == 500
        assert (await get(port, "/readyz"))[0] == 200
        good = True
        assert "outrider_x 7.0" in (await get(port, "/metrics"))[2]


async def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    """With the setting that helps."""
    async with running(Slow()) as port:
        second = Slow()
        with pytest.raises(OSError, match=f"127.0.0.1:{port} for metrics.*metrics_port"):
            async with listening(second, HOST, 0, (HOST, port)):
                pass
        assert second.set_healthy is None


async def test_silent_and_half_spoken_connections_do_not_hold_the_end() -> None:
    """A client that never finishes its request costs at most the closing time."""
    async with running(Slow()) as port:
        _, silent = await asyncio.open_connection(HOST, port)
        _, half = await asyncio.open_connection(HOST, port)
        half.write(b"GET /metrics HTTP/1.1\r\nHost:")
        await half.drain()
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 3
    silent.close()
    half.close()


HALF = (b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /")


@pytest.mark.parametrize("said", HALF, ids=["nothing", "half a request", "one and a half"])
async def test_no_connection_stays(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """One that sends no whole request, or no whole second one, is closed after a while."""
    monkeypatch.setattr(admin, "_CONNECTION_S", 0.3)
    async with running(Slow()) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_many_connections_neither_pile_up_nor_keep_probes_out() -> None:
    """The oldest make room."""
    async with running(Slow()) as port, contextlib.AsyncExitStack() as stack:
        pairs = []
        for _ in range(3 * admin._MOST_CONNECTIONS):
            reader, writer = await asyncio.open_connection(HOST, port)
            stack.callback(writer.close)
            writer.write(HALF[1])
            pairs.append(reader)
        assert (await get(port, "/readyz"))[0] == 200
        for reader in pairs[: 2 * admin._MOST_CONNECTIONS]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_no_admin_where_none_is_wanted() -> None:
    """No port, as in `metrics_port` -1."""
    service = Slow()
    service.loaded.set()
    async with listening(service, HOST, 0) as listens:
        assert listens.admin_port == 0
