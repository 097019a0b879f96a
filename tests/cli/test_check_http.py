"""What `outrider doctor` says of the ports for HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from prometheus_client import make_wsgi_app

from outrider.cli.check_http import check_http
from outrider.cli.demo import free_ports
from outrider.cli.finding import Finding, Level
from outrider.serving.metrics import make_registry
from outrider.serving.settings import DraftSettings, GatewaySettings
from outrider.serving.tracing import Tracing
from tests.support.gateways import gateway_on, until, write_tokenizer_folder


class Quiet(WSGIRequestHandler):
    """Says nothing on standard error."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def look(port: int) -> Finding:
    """What is found of a gateway's port."""
    (finding,) = check_http({"gateway": GatewaySettings(metrics_port=port, http_port=-1)})
    assert finding.topic == f"gateway metrics 127.0.0.1:{port}"
    return finding


def test_a_free_port() -> None:
    """Nothing is there, and something could be."""
    finding = look(free_ports(1)[0])
    assert (finding.level, finding.text) == (Level.OK, "nobody listens; the port is free")


def test_no_port_is_no_finding() -> None:
    """Neither for none, nor for any free one."""
    settings = {
        "gateway": GatewaySettings(metrics_port=-1, http_port=-1),
        "draft": DraftSettings(metrics_port=0),
    }
    assert list(check_http(settings)) == []


@pytest.mark.parametrize(
    ("service", "level", "text"),
    [
        ("gateway", Level.OK, "answers"),
        ("draft", Level.PROBLEM, "another service of ours listens there"),
    ],
)
def test_one_of_our_services(service: str, level: Level, text: str) -> None:
    """The one that belongs there is told from another one that took the port."""
    app = make_wsgi_app(make_registry(service, Tracing.disabled()))
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            finding = look(server.server_port)
        finally:
            server.shutdown()
            thread.join()
    assert (finding.level, finding.text) == (level, text)
    assert ("--gateway-metrics-port" in finding.advice) is (level is Level.PROBLEM)


def test_a_stranger() -> None:
    """Something that speaks no HTTP, and does not even hang up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        finding = look(listener.getsockname()[1])
    assert (finding.level, finding.text) == (Level.PROBLEM, "something else listens there")


def test_an_address_that_is_not_this_machines() -> None:
    """A service could not listen there."""
    (finding,) = check_http({"draft": DraftSettings(metrics_host="192.0.2.1", metrics_port=9)})
    assert finding.level is Level.PROBLEM
    assert "one cannot" in finding.text


async def test_a_gateway_that_runs_is_known_by_its_http_port(tmp_path: Path) -> None:
    """By the document of its API; over TLS nobody asks."""
    async with gateway_on(
        write_tokenizer_folder(tmp_path), ["127.0.0.1:1"], http_port=0
    ) as gateway:
        port = gateway.listening.http_port
        settings = GatewaySettings(metrics_port=-1, http_port=port)
        (finding,) = await asyncio.to_thread(list, check_http({"gateway": settings}))
        assert (finding.topic, finding.text) == (f"gateway HTTP 127.0.0.1:{port}", "answers")
        settings = GatewaySettings(metrics_port=-1, http_port=port, tls_cert="x", tls_key="x")
        (finding,) = await asyncio.to_thread(list, check_http({"gateway": settings}))
        assert (finding.level, finding.text[:16]) == (Level.OK, "something listen")
        # A connection that asyncio has accepted when its server closes is never closed.
        totals = gateway.service._metrics.totals.http
        await until(lambda: totals.established == 3)
