"""Events over HTTP: when they begin, what ends them, and what a failure among them looks like."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import structlog

from outrider.serving.errors import EngineFailed, Unavailable
from tests.support.gateways import until
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, Broken, http_gateway
from tests.support.scripted_target import Script

PATHS = [CHAT, COMPLETIONS]
IDS = [5, 6, 7] * 5


def text_of(path: str, events: list[dict]) -> str:
    """All pieces of choice 0 together."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream(tiny_folder: Path, path: str) -> None:
    """Events that no proxy keeps back, the finish, the usage, `[DONE]`; the text is the whole's."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        body = BODIES[path] | {"seed": 1}
        whole = (await http.ask("POST", path, body)).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await http.ask("POST", path, body | options)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"].startswith("no-cache")
        *events, done = answer.events
        assert done == "[DONE]"
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
        choice = whole["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text_of(path, events) == text
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


async def test_events_come_one_by_one(tiny_folder: Path) -> None:
    """The client has a token's event before the target has made the next one."""
    script = Script(IDS, hang_after=2)
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, BODIES[CHAT] | {"stream": True})
        answer = await client.head()
        while len(answer.body.split(b"\n\n")) < 4:
            assert await client.part(answer)
        assert [list(event["choices"][0]["delta"]) for event in answer.events][1:] == [
            ["content"],
            ["content"],
        ]


async def test_small_events_leave_at_once(tiny_folder: Path) -> None:
    """No event waits until the client's kernel has acknowledged the one before it."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        await (await http.client()).ask("GET", "/healthz")
        (connection,) = http.server._state.connections
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_nothing_comes_before_the_first_message(tiny_folder: Path) -> None:
    """Not even the head: until then nobody knows the status."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", CHAT, BODIES[CHAT] | {"stream": True})
        await until(lambda: http.target.seen.running == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.reader.readexactly(1)
        script.gate.set()
        answer = await client.answer()
        assert answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte(tiny_folder: Path, stream: bool) -> None:
    """It has its own status and body, and the connection is of use for the next request."""
    script = Script(IDS, fail_after=0, failure=EngineFailed("a step failed"))
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        for _ in range(2):
            answer = await client.ask("POST", CHAT, BODIES[CHAT] | {"stream": stream})
            assert answer.status == 500
            assert answer.error["type"] == "server_error"


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_the_middle(
    tiny_folder: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An event says what went wrong, no `[DONE]` comes, and the body has no proper end."""
    script = Script(IDS, fail_after=3, failure=Unavailable("gone"))
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        await client.send("POST", path, BODIES[path] | {"stream": True})
        answer = await client.head()
        assert answer.status == 200
        with pytest.raises(Broken):
            while await client.part(answer):
                pass
        *events, last = answer.events
        assert last["error"]["message"].endswith("gone")
        assert last["error"]["type"] == "server_error"
        assert len(text_of(path, events)) == 3
        assert not [event for event in events if "error" in event or event == "[DONE]"]
        await until(lambda: http.server.num_connections == 0)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_deadline_in_the_middle(tiny_folder: Path) -> None:
    """It ends the stream as any other failure does."""
    script = Script(IDS, hang_after=2)
    async with http_gateway(tiny_folder, script) as http:
        client = await http.client()
        body = BODIES[CHAT] | {"stream": True}
        await client.send("POST", CHAT, body, {"X-Request-Timeout": "0.3"})
        answer = await client.head()
        with pytest.raises(Broken):
            while await client.part(answer):
                pass
        assert answer.events[-1]["error"]["code"] == "timeout"
        await until(lambda: http.target.seen.running == 0)


async def test_keep_alive(tiny_folder: Path) -> None:
    """A connection serves one request after the other, streams among them."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        for number in range(6):
            answer = await client.ask("POST", CHAT, BODIES[CHAT] | {"stream": number % 2 == 0})
            assert answer.status == 200
            assert "connection" not in answer.headers
        assert http.server.num_connections == 1


async def test_pipelining(tiny_folder: Path) -> None:
    """Requests that are sent at once are answered in order, none before the one ahead of it."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        one = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\n\r\n"
        await client.write(b"".join(one % number for number in range(20)))
        data = b""
        while data.count(b"HTTP/1.1 200") < 20 or not data.endswith(b"}"):
            data += await client.reader.read(4096)
        ids = [part.split(b"\r\n")[0] for part in data.split(b"x-request-id: ")[1:]]
        assert ids == [b"%d" % number for number in range(20)]


async def test_pipelined_requests_share_nothing(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is logged in the second one does not bear the first one's id."""
    bound: list[dict] = []
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        inference = http.gateway.service._inference
        models = inference.list_models

        def list_models(caller):
            bound.append(structlog.contextvars.get_contextvars())
            return models(caller)

        monkeypatch.setattr(inference, "list_models", list_models)
        await client.send("POST", CHAT, BODIES[CHAT])
        await client.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).status == 200
        await until(lambda: bound == [{}])


async def test_http_1_0(tiny_folder: Path) -> None:
    """A client that knows no chunks gets none: the end of its connection is the answer's end."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        body = b'{"model": "tiny", "prompt": "x", "stream": true}'
        head = b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await client.write(head % (COMPLETIONS.encode(), len(body)) + body)
        data = await client.reader.read()
        assert b"transfer-encoding" not in data
        assert data.endswith(b"data: [DONE]\n\n")
