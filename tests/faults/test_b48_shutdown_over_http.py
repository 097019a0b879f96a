"""B48 over HTTP: a shutdown loses tokens, or hangs.

Right: `/readyz` turns bad first while `/healthz` stays good, and new requests get 503; streams that
can end in time do so, with their usage and `[DONE]`; the others end at the end of the grace time
with an event that says why and no good end, whole answers with 503; connections without a request
are closed at once, and clients that do not read hold nobody; the process is gone with status 0 at
most 5 s after the grace time, without a traceback. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateways import target_status, until
from tests.support.http_gateway import (
    COMPLETIONS,
    HttpAnswer,
    HttpClient,
    ask_once,
    http_gateway,
)
from tests.support.http_streams import HttpStream, completion, read_all
from tests.support.processes import ServiceProcess, running_process
from tests.support.scripted_target import Script, serving
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(90)

GRACE_S = 3.0
EXIT_S = 5.0
SHORT, LONG = 40, 14_000
"""Tokens of the streams that end within the grace time, and of those that do not."""
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context that is not full before the grace time is over."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=16384)


@contextlib.asynccontextmanager
async def in_front(
    model: Path, log_folder: Path, grace_s: float = GRACE_S
) -> AsyncIterator[ServiceProcess]:
    """A gateway as a process, before a target that makes each a token in 20 ms."""
    script = Script([5, 6, 7] * LONG, delay_s=0.02)
    async with (
        serving(script, target_status(model)) as target,
        running_process(
            "gateway", log_folder, model=model, targets=target.address, grace_s=grace_s
        ) as gateway,
    ):
        await gateway.wait_serving()
        yield gateway


async def ask(port: int, num_tokens: int) -> HttpAnswer:
    """A whole answer, over a connection of its own."""
    return await ask_once(port, "POST", COMPLETIONS, completion(PROMPT, num_tokens))


async def check_refused(port: int) -> None:
    """What a client gets that comes now."""
    answer = await ask(port, 5)
    assert answer.status == 503
    assert answer.error["code"] == "unavailable"
    assert int(answer.headers["retry-after"]) >= 1


async def open_streams(port: int) -> list[HttpStream]:
    """Ten that have begun, every second of which is long."""
    lengths = [SHORT, LONG] * 5
    streams = [await HttpStream.open(port, completion(PROMPT, length)) for length in lengths]
    await asyncio.gather(*(stream.read_first() for stream in streams))
    return streams


def check_ends(streams: list[HttpStream], reason: str) -> None:
    """Short ones are whole; long ones are visibly not."""
    for stream in streams[::2]:
        assert stream.whole, stream.error
        assert stream.usage["completion_tokens"] == SHORT
    for stream in streams[1::2]:
        assert stream.broken, "a stream that was cut off ended as if it were whole"
        assert b"[DONE]" not in stream.answer.body
        assert reason in stream.error["message"]
        assert stream.error["code"] == "unavailable"


async def test_the_gateway_goes_in_order(model: Path, tmp_path: Path) -> None:
    """SIGTERM with five streams that end in time, five that do not, a whole answer that does not, a
    client that does not read, one in the middle of its head, and idle connections."""
    async with in_front(model, tmp_path) as gateway:
        port = gateway.http_port
        idle, half = [await HttpClient.connect(port) for _ in range(2)]
        assert (await idle.ask("GET", "/readyz")).status == 200
        await half.write(b"POST / HT")
        stalled = await HttpStream.open(port, completion(PROMPT, LONG), receive_buffer=4096)
        await stalled.read_first()
        whole = asyncio.create_task(ask(port, LONG))
        streams = await open_streams(port)
        reading = asyncio.create_task(read_all(streams, GRACE_S + EXIT_S))

        started_s = time.monotonic()
        gateway.terminate()
        await gateway.wait_event("draining")
        ready = await ask_once(port, "GET", "/readyz")
        assert (ready.status, ready.body) == (503, b"draining\n")
        assert (await ask_once(port, "GET", "/healthz")).status == 200
        await check_refused(port)
        for client in (idle, half):
            await asyncio.wait_for(client.closed(), 1)
            client.close()
        await reading
        check_ends(streams, "shutting down")
        refused = await whole
        assert refused.status == 503
        assert "shutting down" in refused.error["message"]
        assert await gateway.wait_exit(GRACE_S + EXIT_S) == 0, gateway.output
        assert GRACE_S <= time.monotonic() - started_s <= GRACE_S + EXIT_S
        assert "Traceback" not in gateway.output
        await stalled.read_all()
        assert stalled.broken, "the stalled client was told that all is well"
        assert "error" not in {line["level"] for line in gateway.events}
        for stream in (*streams, stalled):
            stream.close()


@pytest.mark.slow
async def test_the_target_goes_in_order(model: Path, tmp_path: Path) -> None:
    """SIGTERM to the target: the gateway is alive and not ready, refuses at once, and tells its
    streams the same."""
    async with (
        running_process(
            "target", tmp_path, model=model, drafters="", kv_tokens=220_000,
            grace_s=GRACE_S, stream_tokens=64,
        ) as target,
        running_process("gateway", tmp_path, model=model, targets=target.address) as gateway,
    ):  # fmt: skip
        await gateway.wait_serving()
        port = gateway.http_port
        streams = await open_streams(port)
        reading = asyncio.create_task(read_all(streams, GRACE_S + EXIT_S))
        started_s = time.monotonic()
        target.terminate()
        async with asyncio.timeout(GRACE_S):
            while (await ask_once(port, "GET", "/readyz")).status == 200:
                await asyncio.sleep(0.02)
        assert (await ask_once(port, "GET", "/healthz")).status == 200
        await check_refused(port)
        await reading
        check_ends(streams, "shutting down")
        assert await target.wait_exit(GRACE_S + EXIT_S) == 0, target.output
        assert time.monotonic() - started_s <= GRACE_S + EXIT_S
        assert gateway.process.poll() is None
        assert "Traceback" not in target.output + gateway.output
        for stream in streams:
            stream.close()


async def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    """Whoever does not want to wait for the grace time need not, and no stream looks whole."""
    async with in_front(model, tmp_path, grace_s=60) as gateway:
        stream = await HttpStream.open(gateway.http_port, completion(PROMPT, LONG))
        await stream.read_first()
        gateway.terminate()
        await gateway.wait_event("draining")
        assert await asyncio.wait_for(stream.read(), 5), "the first signal cut it off"
        gateway.terminate()
        assert await gateway.wait_exit(1.0) == 128 + 15
        await stream.read_all()
        assert stream.broken
        stream.close()


async def test_idle_connections_hold_nobody(model: Path, tmp_path: Path) -> None:
    """A hundred connections without a request: they are closed, and the process ends at once."""
    async with in_front(model, tmp_path, grace_s=60) as gateway:
        clients = [await HttpClient.connect(gateway.http_port) for _ in range(100)]
        for client in clients[:50]:
            assert (await client.ask("GET", "/healthz")).status == 200
        gateway.terminate()
        await asyncio.wait_for(asyncio.gather(*(client.closed() for client in clients)), EXIT_S)
        for client in clients:
            client.close()
        assert await gateway.wait_exit(EXIT_S) == 0, gateway.output
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", gateway.http_port)


async def test_who_does_not_read_holds_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All buffers on the way to a client are full: its stream is cut at the end of the grace time,
    and nothing waits for it."""
    monkeypatch.setattr("gateway.http.server._SEND_BUFFER_BYTES", 4096)
    name = "m" * 4000  # in every event
    async with http_gateway(model, Script([5] * 1000), served_name=name) as http:
        body = completion(PROMPT, 1000) | {"model": name}
        stream = await HttpStream.open(http.server.port, body, receive_buffer=4096)
        await until(lambda: any(each.stuck for each in http.server._state.connections))
        started_s = time.monotonic()
        await http.gateway.listening.health.drain()
        await http.gateway.service.drain()
        assert await http.gateway.listening.calls.drain(0.1) == 1
        assert time.monotonic() - started_s < EXIT_S
        await until(lambda: http.server.num_connections == 0, timeout_s=1)
        await until(lambda: http.target.seen.running == 0, timeout_s=1)
        await stream.read_all()
        assert stream.broken
        stream.close()
