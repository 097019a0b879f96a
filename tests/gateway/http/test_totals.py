"""What the HTTP port counts of what is no request for text: nobody is refused unseen."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.gateways import until
from tests.support.http_gateway import (
    BODIES,
    CHAT,
    HOST,
    HttpClient,
    HttpGateway,
    http_gateway,
    http_gateway_alone,
)
from tests.support.scrapes import scrape_registry
from tests.support.scripted_target import Script
from tests.support.sums import assert_gateway_adds_up

GOOD_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


def answers(http: HttpGateway) -> dict[str, float]:
    """By class of status."""
    now = scrape_registry(http.gateway.service.registry)
    assert_gateway_adds_up(now)
    return now.by("http_answers_total", "status")


def connections(http: HttpGateway) -> tuple[float, float, float]:
    """Accepted, established and open ones."""
    now = scrape_registry(http.gateway.service.registry)
    stages = now.by("http_connections_total", "stage")
    return stages["accepted"], stages["established"], now("http_connections_open")


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
        f"PUT {CHAT} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        GOOD_HEAD + b"A header without a colon\r\n\r\n",
        GOOD_HEAD + b"X-Long: " + b"x" * 40_000,
        GOOD_HEAD + b"Content-Length: -1\r\n\r\n",
        b"what is this\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS where there is none
    ],
)
async def test_what_is_no_request_is_counted(tiny_folder: Path, data: bytes) -> None:
    """As an answer of its class, and not among the requests for text."""
    async with http_gateway_alone(tiny_folder) as http:
        answer = await (await http.client()).raw_answer(data)
        assert 400 <= answer.status < 500
        assert answers(http) == {"2xx": 0, "4xx": 1, "5xx": 0}
        assert http.gateway.service._metrics.totals.started == 0


async def test_each_answer_is_counted_once(tiny_folder: Path) -> None:
    """Whole ones and streams, when they begin; probes as well."""
    async with http_gateway(tiny_folder, Script([5, 6])) as http:
        client = await http.client()
        await client.ask("POST", CHAT, BODIES[CHAT] | {"stream": True})
        await client.ask("POST", CHAT, BODIES[CHAT])
        await client.ask("GET", "/readyz")
        await client.ask("POST", CHAT, {})
        await http.target.set_serving(False)
        await http.gateway.wait_health(False)
        await client.ask("POST", CHAT, BODIES[CHAT])
        await client.ask("GET", "/readyz")
        assert answers(http) == {"2xx": 3, "4xx": 1, "5xx": 2}
        started = http.gateway.service._metrics.totals.started_by_door
        assert started == {"grpc": 0, "http": 4}


async def test_connections(tiny_folder: Path) -> None:
    """Each is counted when it comes, and open until it has gone; one too many gets its 503."""
    async with http_gateway(tiny_folder, Script([5], gate=asyncio.Event())) as http:
        http.server._state.most_connections = 2
        clients = [await http.client() for _ in range(2)]
        for client in clients:
            await client.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.target.seen.running == 2)
        assert connections(http) == (2, 2, 2)
        assert (await http.ask("GET", "/healthz")).status == 503
        assert answers(http)["5xx"] == 1
        for client in clients:
            client.close()
        await until(lambda: connections(http) == (3, 3, 0))


async def test_a_failed_handshake_shows(tiny_folder: Path, tmp_path: Path) -> None:
    """Plain text, an authority that is not known, no certificate: accepted, never established."""
    authority = Authority(tmp_path / "ca")
    pair, own = authority.issue("server"), authority.issue("client")
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    settings["tls_client_ca"] = str(authority.ca)
    good = ssl.create_default_context(cafile=str(authority.ca))
    good.check_hostname = False
    nobody = ssl.create_default_context(cafile=str(authority.ca))
    nobody.check_hostname = False
    good.load_cert_chain(own.cert, own.key)
    async with http_gateway_alone(tiny_folder, **settings) as http:
        client = await HttpClient.connect(http.server.port, good)
        assert (await client.ask("GET", "/healthz")).status == 200
        assert connections(http) == (1, 1, 1)
        client.close()
        for tls in (None, nobody, ssl.create_default_context()):
            await refused(http.server.port, tls)
        await until(lambda: connections(http) == (4, 1, 0))
        assert answers(http) == {"2xx": 1, "4xx": 0, "5xx": 0}


async def refused(port: int, tls: ssl.SSLContext | None) -> None:
    """A connection over which nothing is answered."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(
            HOST, port, ssl=tls, server_hostname="localhost" if tls else None
        )
        writer.write(GOOD_HEAD + b"\r\n")
        assert await reader.read() == b""
        writer.close()
