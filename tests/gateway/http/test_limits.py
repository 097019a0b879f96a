"""What one client can ask of the port: sizes, times and numbers, each with its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from outrider.serving.errors import Unauthenticated
from tests.support.gateways import until
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, MODEL, Broken, http_gateway
from tests.support.scripted_target import Script

IDS = [5, 6, 7]
MIB = 2**20
LIMITS = {"max_message_bytes": MIB, "max_prompt_bytes": MIB // 2}


def head(length: int | None, *more: str, path: str = CHAT) -> bytes:
    """Of a request whose body has `length` bytes; None: as many as come."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", size, *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_a_body_that_is_too_large_by_its_own_word(tiny_folder: Path) -> None:
    """413 names the limit, before anything of the body was sent, and the connection closes."""
    async with http_gateway(tiny_folder, Script(IDS), **LIMITS) as http:
        client = await http.client()
        answer = await client.raw_answer(head(MIB + 1))
        assert answer.status == 413
        assert f"{MIB} bytes" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        assert await client.closed()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_reaches_its_client(
    tiny_folder: Path, chunked: bool
) -> None:
    """A client that first sends everything, and then reads, still finds the answer."""
    async with http_gateway(tiny_folder, Script(IDS), **LIMITS) as http:
        client = await http.client()
        size = 8 * MIB
        await client.write(head(None if chunked else size))
        part = b" " * 65536
        part = b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
        for _ in range(size // 65536):
            await client.write(part)
        answer = await client.raw_answer(b"")
        assert answer.status == 413


async def test_a_body_of_exactly_the_limit(tiny_folder: Path) -> None:
    """It is taken, in one piece or in chunks."""
    async with http_gateway(tiny_folder, Script(IDS), **LIMITS) as http:
        body = b'{"model": "tiny", "prompt": "x"}'
        body += b" " * (MIB - len(body))
        client = await http.client()
        assert (await client.ask("POST", "/v1/completions", body)).status == 200
        client = await http.client()
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (len(body[at : at + 50_000]), body[at : at + 50_000])
            for at in range(0, MIB, 50_000)
        )
        data = head(None, path="/v1/completions") + chunks + b"0\r\n\r\n"
        assert (await client.raw_answer(data)).status == 200


async def test_a_slow_body(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """408 when its time is over, whatever trickles in."""
    monkeypatch.setattr("gateway.http.body.BODY_S", 0.3)
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        await client.write(head(1000))
        trickle = asyncio.create_task(drip(client.write))
        answer = await client.raw_answer(b"")
        assert answer.status == 408
        assert "0.3 s" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        trickle.cancel()


async def test_bodies_all_together(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of all bodies is bounded too, and free again when a client leaves."""
    monkeypatch.setattr("gateway.http.body._BODIES", 1)
    async with http_gateway(tiny_folder, Script(IDS), **LIMITS) as http:
        first = await http.client()
        await first.write(head(MIB) + b" " * (MIB - 10))
        while (answer := await http.ask("POST", CHAT, BODIES[CHAT])).status == 200:
            pass  # the first one has not arrived yet
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        first.reset()
        while (answer := await http.ask("POST", CHAT, BODIES[CHAT])).status == 429:
            pass
        assert answer.status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Content-Type", "application/jsonp"),
        ("Content-Encoding", "gzip"),
    ],
)
async def test_a_body_that_is_no_json(tiny_folder: Path, name: str, value: str) -> None:
    """415 names the header."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        answer = await http.ask("POST", CHAT, BODIES[CHAT], {name: value})
        assert answer.status == 415
        assert answer.error["message"].startswith(f"{name}: ")
        with_charset = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert (await http.ask("POST", CHAT, BODIES[CHAT], with_charset)).status == 200


async def test_expect_100_continue(tiny_folder: Path) -> None:
    """Who asks is told to go on, or is refused without having sent the body."""
    body = b'{"model": "tiny", "prompt": "x"}'
    async with http_gateway(tiny_folder, Script(IDS), **LIMITS) as http:
        client = await http.client()
        expect = "Expect: 100-continue"
        await client.write(head(len(body), expect, path="/v1/completions"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.raw_answer(body)).status == 200
        client = await http.client()
        await client.write(head(MIB + 1, expect))
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413 ")


async def test_who_is_refused_is_so_before_the_body(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key and a gateway that is full need no body to be told."""
    async with http_gateway(tiny_folder, Script(IDS), max_concurrent=1) as http:
        script_gate = http.target.script.gate = asyncio.Event()
        running = await http.client()
        await running.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.gateway.num_running == 1)
        answer = await (await http.client()).raw_answer(head(1000))
        assert answer.status == 429
        assert "max_concurrent" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        script_gate.set()
        assert (await running.answer()).status == 200

        def unknown(_: object) -> None:
            raise Unauthenticated("no key")

        admission = http.gateway.service._inference._admission
        monkeypatch.setattr(admission, "identify", unknown)
        answer = await (await http.client()).raw_answer(head(1000))
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        for path, status in (("/v1/models", 401), ("/v1/models/tiny", 401), ("/readyz", 200)):
            assert (await http.ask("GET", path)).status == status


async def test_a_head_that_is_too_large(tiny_folder: Path) -> None:
    """431, be it in one piece or without end."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        answer = await http.ask("GET", "/v1/models", headers={"X-Much": "x" * 17_000})
        assert answer.status == 431
        client = await http.client()
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                await client.write(b"X" * 1024)
        answer = await client.raw_answer(b"")
        assert answer.status == 431
        assert "x-request-id" in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 what TLS would say\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        head(None) + b"no number\r\n",
    ],
)
async def test_what_is_no_http(tiny_folder: Path, data: bytes) -> None:
    """It is told so in the same shape as everything else, and the connection closes."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        answer = await client.raw_answer(data)
        assert answer.status == 400
        assert answer.error["message"].startswith("this is no HTTP")
        assert answer.headers["connection"] == "close"
        assert await client.closed()
        assert (await http.ask("GET", "/readyz")).status == 200


async def test_a_slow_head(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that does not end takes no connection for long; neither does saying nothing."""
    monkeypatch.setattr("gateway.http.connection.HEAD_S", 0.3)
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        silent, slow, used = [await http.client() for _ in range(3)]
        assert (await used.ask("GET", "/readyz")).status == 200
        await used.write(b"GET /ready")
        trickle = asyncio.create_task(drip(slow.write))
        for client in (silent, slow, used):
            await client.closed()
        trickle.cancel()
        await until(lambda: http.server.num_connections == 0)


async def test_idle_connections_make_room(tiny_folder: Path) -> None:
    """At the limit a new connection takes the place of the one that was idle for longest."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        http.server._state.most_connections = 3
        clients = [await http.client() for _ in range(3)]
        for client in clients:
            assert (await client.ask("GET", "/readyz")).status == 200
        assert (await clients[0].ask("GET", "/readyz")).status == 200
        newest = await http.client()
        assert (await newest.ask("GET", "/readyz")).status == 200
        await clients[1].closed()
        await until(lambda: http.server.num_connections == 3)
        assert (await clients[0].ask("GET", "/readyz")).status == 200


async def test_busy_connections_do_not_make_room(tiny_folder: Path) -> None:
    """Where all are busy a new one is told 503, and they go on."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        http.server._state.most_connections = 2
        clients = [await http.client() for _ in range(2)]
        for client in clients:
            await client.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.target.seen.running == 2)
        answer = await http.ask("POST", CHAT, BODIES[CHAT])
        assert answer.status == 503
        assert "2 connections" in answer.error["message"]
        script.gate.set()
        for client in clients:
            assert (await client.answer()).status == 200


@pytest.mark.parametrize(("stream", "name_chars"), [(True, 4000), (False, 600_000)])
async def test_a_client_that_does_not_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, name_chars: int
) -> None:
    """After `stall_s` its connection is cut and its place is free; the target waits.

    The model's name makes events, or the one answer, larger than the buffers on the way.
    """
    monkeypatch.setattr("gateway.http.server._SEND_BUFFER_BYTES", 4096)
    script, name = Script([5] * 200, delay_s=0.001), "m" * name_chars
    async with http_gateway(tiny_folder, script, served_name=name, stall_s=0.5) as http:
        client = await http.client(receive_buffer=4096)
        with capture_logs() as lines:
            await client.send("POST", CHAT, BODIES[CHAT] | {"model": name, "stream": stream})
            await until(lambda: http.server.num_connections == 0, timeout_s=10)
            await until(lambda: http.gateway.num_running == 0)
            await until(lambda: http.target.seen.running == 0)
        (line,) = [line for line in lines if line["event"] == "request"]
        if stream:  # in its middle; a whole answer is given when the request itself is over
            assert line["outcome"] == "failed"
            assert "not read for 0.5 s" in line["error"]
            assert line["completion_tokens"] < 150
        with pytest.raises(Broken):
            await client.answer()


@pytest.mark.parametrize(
    ("settings", "asked", "given"),
    [
        ({}, {}, 16),
        ({"max_tokens": 4}, {}, 4),
        ({"default_max_tokens": 20}, {}, 20),
        ({}, {"min_tokens": 18}, 18),
    ],
)
async def test_tokens_of_a_plain_text_that_does_not_say(
    tiny_folder: Path, settings: dict[str, int], asked: dict[str, int], given: int
) -> None:
    """OpenAI's sixteen where the operator says nothing; a lower cap refuses nobody for them."""
    async with http_gateway(tiny_folder, Script([5] * 30), **settings) as http:
        body = {"model": MODEL, "prompt": "Hello"} | asked
        answer = await http.ask("POST", COMPLETIONS, body)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == given


async def drip(write: Callable[[bytes], Awaitable[None]]) -> None:
    """A byte now and then."""
    with contextlib.suppress(ConnectionError):
        while True:
            await write(b"X")
            await asyncio.sleep(0.02)
