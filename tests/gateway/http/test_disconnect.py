"""Clients that leave: wherever their request is, it ends within moments, here and at the target."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.gateways import until
from tests.support.http_gateway import (
    BODIES,
    CHAT,
    HttpClient,
    HttpGateway,
    http_gateway,
)
from tests.support.scripted_target import Script

IDS = [5] * 200
STREAM = BODIES[CHAT] | {"stream": True}


async def nothing_is_left(http: HttpGateway) -> None:
    """No connection, no place, no call, nothing at the target."""
    await until(lambda: http.server.num_connections == 0, timeout_s=1)
    await until(lambda: http.gateway.num_running == 0, timeout_s=1)
    await until(lambda: not http.calls._calls, timeout_s=1)
    await until(lambda: http.target.seen.running == 0, timeout_s=1)


def leave(client: HttpClient, how: str) -> None:
    """In good order, or not."""
    if how == "close":
        client.close()
    else:
        client.reset()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(tiny_folder: Path, stream: bool, how: str) -> None:
    """In the target's line or its prefill; a client that wants one answer may leave as well."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        with capture_logs() as lines:
            await client.send("POST", CHAT, BODIES[CHAT] | {"stream": stream})
            await until(lambda: http.target.seen.running == 1)
            leave(client, how)
            await nothing_is_left(http)
        assert http.target.seen.cancelled == 1
        (line,) = [line for line in lines if line["event"] == "request"]
        assert line["outcome"] == "cancelled"
        assert not [line for line in lines if line["log_level"] == "error"]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle(tiny_folder: Path, stream: bool, how: str) -> None:
    """Tokens have come already, and the client has seen them or not."""
    script = Script(IDS, delay_s=0.02)
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, BODIES[CHAT] | {"stream": stream})
        if stream:
            await client.head()
        await until(lambda: http.target.seen.tokens_sent > 2)
        leave(client, how)
        await nothing_is_left(http)
        assert http.target.seen.cancelled == 1


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout": "0.6"}])
async def test_while_a_message_waits_for_its_reader(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """Who stops to read and then leaves, or whose time is over by then, has ended the request: it
    is not the gateway that shuts down."""
    monkeypatch.setattr("gateway.http.server._SEND_BUFFER_BYTES", 4096)
    script, name = Script(IDS, delay_s=0.001), "m" * 4000
    async with http_gateway(tiny_folder, script, served_name=name) as http:
        client = await http.client(receive_buffer=4096)
        with capture_logs() as lines:
            await client.send("POST", CHAT, STREAM | {"model": name}, headers)
            await asyncio.sleep(0.3)
            assert http.gateway.num_running == 1
            if not headers:
                client.reset()
            await nothing_is_left(http)
        (line,) = [line for line in lines if line["event"] == "request"]
        assert line["code"] == ("deadline_exceeded" if headers else "cancelled")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_while_the_body_is_read(tiny_folder: Path, how: str) -> None:
    """No request has come of it, so there is no line; what was read of it counts no more."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        with capture_logs() as lines:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            await client.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            await until(lambda: len(http.calls._calls) == 1)
            leave(client, how)
            await nothing_is_left(http)
        assert not [line for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_with_more_requests_behind(tiny_folder: Path, how: str) -> None:
    """What was pipelined does not hide that the client has left, and does not run."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.target.seen.running == 1)
        await client.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        await asyncio.sleep(0.05)
        leave(client, how)
        await nothing_is_left(http)
        assert len(http.target.seen.requests) == 1


async def test_behind_a_large_body(tiny_folder: Path) -> None:
    """A body that fills the reader's buffers does not hide it either."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, STREAM, {"X-Padding": "x" * 8000})
        await until(lambda: http.target.seen.running == 1)
        client.reset()
        await nothing_is_left(http)
        script.gate.set()
        client = await http.client()
        padded = b'{"model": "tiny", "prompt": "x",' + b" " * 300_000 + b'"stream": true}'
        script.gate = asyncio.Event()
        await client.send("POST", "/v1/completions", padded)
        await until(lambda: http.target.seen.running == 1)
        client.reset()
        await nothing_is_left(http)


async def test_many_that_leave_at_once(tiny_folder: Path) -> None:
    """Nothing of them stays behind, and the next client is served."""
    script = Script(IDS, delay_s=0.01)
    async with http_gateway(tiny_folder, script) as http:
        clients = [await http.client() for _ in range(40)]
        for client in clients:
            await client.send("POST", CHAT, STREAM)
        await until(lambda: http.target.seen.running == 40)
        for client in clients:
            client.reset()
        await nothing_is_left(http)
        script.ids, script.delay_s = [5, 6], 0
        assert (await http.ask("POST", CHAT, STREAM)).events[-1] == "[DONE]"
