"""Many connections at once: those that do nothing, or as little as they can, block nobody, and who
is refused is so at once while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.support.gateways import target_status, until
from tests.support.http_gateway import BODIES, CHAT, HttpClient, ask_once, http_gateway
from tests.support.http_streams import HttpStream
from tests.support.processes import ServiceProcess, running_process
from tests.support.scripted_target import Script, ScriptedTarget, serving

IDS = [5, 6, 7]
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_A_BODY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n{"
)
QUICK_S = 0.5
"""What a probe may take."""
SHED_S = 0.05
"""What a refusal may take while the gateway is busy."""
NUM_STREAMS = 32
KEY = "or-alice"


@contextlib.asynccontextmanager
async def in_front(
    folder: Path, log_folder: Path, script: Script, **settings: object
) -> AsyncIterator[tuple[ServiceProcess, ScriptedTarget]]:
    """A gateway as a process of its own."""
    async with (
        serving(script, target_status(folder)) as target,
        running_process(
            "gateway", log_folder, model=folder, targets=target.address, **settings
        ) as gateway,
    ):
        await gateway.wait_serving()
        yield gateway, target


async def drip(clients: Iterable[HttpClient]) -> None:
    """A byte each, again and again."""
    for client in clients:
        with contextlib.suppress(ConnectionError):
            await client.write(b"x")
    await asyncio.sleep(0.1)


async def test_five_hundred_that_do_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    """300 idle connections, 100 heads and 100 bodies that do not end: requests on new connections
    are answered, probes within half a second, and those that were idle are still of use."""
    async with in_front(tiny_folder, tmp_path, Script(IDS)) as (gateway, _):
        port = gateway.http_port
        clients = [await HttpClient.connect(port) for _ in range(500)]
        idle, heads, bodies = clients[:300], clients[300:400], clients[400:]
        for client in idle:
            assert (await client.ask("GET", "/healthz")).status == 200
        for client in heads:
            await client.write(HALF_A_HEAD)
        for client in bodies:
            await client.write(HALF_A_BODY)
        for _ in range(10):
            await drip(heads + bodies)
            started_s = time.monotonic()
            assert (await ask_once(port, "GET", "/readyz")).status == 200
            assert time.monotonic() - started_s < QUICK_S
            assert (await ask_once(port, "POST", CHAT, BODIES[CHAT])).status == 200
        assert (await idle[0].ask("POST", CHAT, BODIES[CHAT])).status == 200
        for client in clients:
            client.close()


async def test_bodies_that_do_not_end_make_room(tiny_folder: Path) -> None:
    """At the limit a new connection takes the place of who has been sending for longest, not of
    who is being answered."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        http.server._state.most_connections = 3
        served, first, second = [await http.client() for _ in range(3)]
        await served.send("POST", CHAT, BODIES[CHAT])
        await until(lambda: http.target.seen.running == 1)
        for number, client in enumerate((first, second), 2):
            await client.write(HALF_A_BODY)
            await until(lambda number=number: len(http.calls._calls) == number)
        assert (await http.ask("GET", "/readyz")).status == 200
        await first.closed()
        assert not second.reader.at_eof()
        await until(lambda: len(http.calls._calls) == 2)
        script.gate.set()
        assert (await served.answer()).status == 200


async def refusals(port: int, status: int, key: str | None = KEY) -> list[float]:
    """Seconds that each of a hundred took, from its connection's beginning."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    seconds = []
    for _ in range(100):
        await asyncio.sleep(0.01)
        started_s = time.monotonic()
        answer = await ask_once(port, "POST", CHAT, BODIES[CHAT], headers)
        seconds.append(time.monotonic() - started_s)
        assert answer.status == status, answer.body
        assert answer.error["message"]
    return seconds


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_refusals_while_32_streams_run(tiny_folder: Path, tmp_path: Path) -> None:
    """No key: 401; no place: 429; shutting down: 503. 95 of a hundred are there within 50 ms, and
    the streams go on. The others may be the machine's: clients and target share its cores."""
    keys = tmp_path / "keys.toml"
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{sha256}"\n')
    script = Script([5] * 250, delay_s=0.05)
    settings = {"max_concurrent": NUM_STREAMS, "api_keys": keys, "grace_s": 30}
    async with in_front(tiny_folder, tmp_path, script, **settings) as (gateway, target):
        port = gateway.http_port
        headers = {"Authorization": f"Bearer {KEY}"}
        streams = []
        for _ in range(NUM_STREAMS):
            client = await HttpClient.connect(port)
            await client.send("POST", CHAT, BODIES[CHAT] | {"stream": True}, headers)
            streams.append(HttpStream(client))
        reading = [asyncio.create_task(stream.read_all()) for stream in streams]
        await until(lambda: target.seen.running == NUM_STREAMS, timeout_s=10)
        took = {401: await refusals(port, 401, None), 429: await refusals(port, 429)}
        gateway.terminate()
        await gateway.wait_event("draining")
        took[503] = await refusals(port, 503)
        assert target.seen.running == NUM_STREAMS
        for status, seconds in took.items():
            assert sorted(seconds)[94] < SHED_S, (status, sorted(seconds)[90:])
        await asyncio.gather(*reading)
        assert all(stream.ended for stream in streams)
        for stream in streams:
            stream.close()
        assert await gateway.wait_exit() == 0


async def test_bodies_of_many_small_chunks(tiny_folder: Path, tmp_path: Path) -> None:
    """A byte a chunk costs hundreds of times what the size says: others get their turn all the
    same, and the body is understood in the end."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    flood = head + b"1\r\n \r\n" * 150_000
    async with in_front(tiny_folder, tmp_path, Script(IDS)) as (gateway, _):
        port = gateway.http_port
        clients = [await HttpClient.connect(port) for _ in range(8)]
        floods = [asyncio.create_task(client.write(flood)) for client in clients]
        for _ in range(10):
            started_s = time.monotonic()
            assert (await ask_once(port, "GET", "/readyz")).status == 200
            assert time.monotonic() - started_s < QUICK_S
            await asyncio.sleep(0.05)
        for client, writing in zip(clients, floods, strict=True):
            writing.cancel()
            client.close()
        body = json.dumps(BODIES[CHAT]).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        client = await HttpClient.connect(port)
        assert (await client.raw_answer(head + chunks + b"0\r\n\r\n")).status == 200
        client.close()
