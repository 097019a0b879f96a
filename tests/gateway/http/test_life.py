"""The HTTP port from its opening to its end: drains, shutdowns, TLS, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from outrider.serving.tls import ClientTls
from tests.support.certificates import Authority
from tests.support.gateways import target_status, until
from tests.support.http_gateway import (
    BODIES,
    CHAT,
    HOST,
    Broken,
    HttpClient,
    HttpGateway,
    http_gateway,
    http_gateway_alone,
)
from tests.support.processes import running_process
from tests.support.scripted_target import Script, serving

IDS = [5, 6, 7] * 5
STREAM = BODIES[CHAT] | {"stream": True}


@contextlib.asynccontextmanager
async def draining(http: HttpGateway, grace_s: float) -> AsyncIterator[None]:
    """What a signal makes of the gateway, while the block runs; its end is waited for behind it."""
    listening = http.gateway.listening
    await listening.health.drain()
    await http.gateway.service.drain()
    ending = asyncio.create_task(listening.calls.drain(grace_s))
    yield
    await ending


async def test_a_drain(tiny_folder: Path) -> None:
    """Idle connections close, new requests get 503 and a close, what runs ends as it would have."""
    script = Script(IDS, delay_s=0.02)
    async with http_gateway(tiny_folder, script) as http:
        idle, running = await http.client(), await http.client()
        assert (await idle.ask("GET", "/readyz")).status == 200
        await running.send("POST", CHAT, STREAM)
        answer = await running.head()
        async with draining(http, grace_s=10):
            assert await idle.closed()
            refused = await http.ask("POST", CHAT, BODIES[CHAT])
            assert refused.status == 503
            assert refused.headers["connection"] == "close"
            assert "shutting down" in refused.error["message"]
            ready = await http.ask("GET", "/readyz")
            assert (ready.status, ready.body) == (503, b"draining\n")
            assert (await http.ask("GET", "/healthz")).status == 200
            while await running.part(answer):
                pass
            assert answer.events[-1] == "[DONE]"
            assert await running.closed()
        await until(lambda: http.target.seen.finished == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_grace_time(tiny_folder: Path, stream: bool) -> None:
    """What still runs ends with an error that says why; as its status if nothing has come yet."""
    script = Script(IDS, hang_after=2)
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, BODIES[CHAT] | {"stream": stream})
        await until(lambda: http.target.seen.tokens_sent == 2)
        head = await client.head() if stream else None
        with capture_logs() as lines:
            async with draining(http, grace_s=0.05):
                pass
        if head is None:
            answer = await client.answer()
            assert answer.status == 503
            assert "shutting down" in answer.error["message"]
            assert answer.headers["connection"] == "close"
        else:
            with pytest.raises(Broken):
                while await client.part(head):
                    pass
            assert "shutting down" in head.events[-1]["error"]["message"]
        (line,) = [line for line in lines if line["event"] == "request"]
        assert (line["outcome"], line["code"]) == ("failed", "unavailable")


async def test_an_end_without_a_drain(tiny_folder: Path) -> None:
    """Open requests end, nothing is left running, and nothing waits for clients that do not."""
    script = Script(IDS, gate=asyncio.Event())
    with capture_logs() as lines:
        async with http_gateway(tiny_folder, script) as http:
            running, half, idle = [await http.client() for _ in range(3)]
            await running.send("POST", CHAT, STREAM)
            await half.write(b"POST / HT")
            assert (await idle.ask("GET", "/readyz")).status == 200
            await until(lambda: http.target.seen.running == 1)
            http.clients.pop_all()  # they stay open
        for client in (running, half, idle):
            await client.closed()
            client.close()
    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["outcome"] == "cancelled"


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """What a process ignores its children ignore, too, and this one may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeds_hangups")
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
async def test_a_signal(tiny_folder: Path, tmp_path: Path, numbers: list[int]) -> None:
    """A whole process: a stream that runs is read to its `[DONE]`, then the process ends with 0,
    also when its terminal is closed."""
    script = Script(IDS, delay_s=0.05)
    async with (
        serving(script, target_status(tiny_folder)) as target,
        running_process("gateway", tmp_path, model=tiny_folder, targets=target.address) as process,
    ):
        await process.wait_serving()
        client = await HttpClient.connect(process.http_port)
        await client.send("POST", CHAT, STREAM)
        answer = await client.head()
        for number in numbers:
            process.process.send_signal(number)
            await asyncio.sleep(0.05)
        while await client.part(answer):
            pass
        assert answer.events[-1] == "[DONE]"
        assert await client.closed()
        client.close()
        assert await process.wait_exit() == 0
        assert "Traceback" not in process.output


async def test_no_port(tiny_folder: Path) -> None:
    """-1 opens none."""
    async with http_gateway_alone(tiny_folder, http_port=-1) as http:
        assert http.gateway.service._http is None
        assert http.gateway.listening.http_port == 0


async def test_an_address_of_ipv6(tiny_folder: Path) -> None:
    """As an operator writes it, without brackets."""
    async with http_gateway_alone(tiny_folder, http_host="::1") as http:
        reader, writer = await asyncio.open_connection("::1", http.server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_tls(tiny_folder: Path, tmp_path: Path) -> None:
    """HTTPS with the certificate of the gRPC port: streams, failures, clients that leave."""
    authority = Authority(tmp_path)
    pair = authority.issue("gateway", "localhost", HOST)
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    script = Script(IDS, fail_after=3)
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with http_gateway(tiny_folder, script, tls=ClientTls(authority.ca), **settings) as http:
        client = await http.client(tls=trusting)
        await client.send("POST", CHAT, STREAM)
        answer = await client.head()
        with pytest.raises(Broken):
            while await client.part(answer):
                pass
        assert "error" in answer.events[-1]
        client = await http.client(tls=trusting)
        script.fail_after = None
        for _ in range(2):
            assert (await client.ask("POST", CHAT, STREAM)).events[-1] == "[DONE]"
        too_large = await client.ask("POST", CHAT, b" " * 5_000_000)
        assert too_large.status == 413
        client = await http.client(tls=trusting)
        script.gate = asyncio.Event()
        await client.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.target.seen.running == 1)
        client.reset()
        await until(lambda: http.target.seen.running == 0, timeout_s=1)
        plain = await http.client()
        with pytest.raises((Broken, ConnectionError)):
            await plain.ask("GET", "/healthz")


async def test_handshakes_that_do_not_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a limit the one that has lasted longest gives way, and all end with the port; who
    shakes hands is served."""
    monkeypatch.setattr("gateway.http.server._MOST_HANDSHAKES", 3)
    authority = Authority(tmp_path)
    pair = authority.issue("gateway", "localhost", HOST)
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with http_gateway_alone(tiny_folder, **settings) as http:
        silent = [await http.client() for _ in range(8)]
        for client in silent[:5]:
            await client.closed()
        client = await http.client(tls=trusting)
        assert (await client.ask("GET", "/healthz")).status == 200
        await silent[5].closed()
        assert not any(client.reader.at_eof() for client in silent[6:])
    for client in silent[6:]:
        await client.closed()
