"""What each path answers, and what every answer has: headers, ids, statuses, one shape of error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from outrider.serving.errors import Overloaded
from tests.support.gateways import until
from tests.support.http_gateway import (
    BODIES,
    CHAT,
    COMPLETIONS,
    HOST,
    MODEL,
    http_gateway,
    http_gateway_alone,
)
from tests.support.scripted_target import Script

PATHS = [CHAT, COMPLETIONS]
IDS = [5, 6, 7]


@pytest.mark.parametrize("path", PATHS)
async def test_one_answer(tiny_folder: Path, path: str) -> None:
    """A request that wants no stream gets one JSON of a known length, under the id it gave."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        answer = await http.ask("POST", path, BODIES[path], {"X-Request-Id": "mine-1"})
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(answer.body))
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json["id"].endswith("-mine-1")
        assert answer.json["model"] == MODEL
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 3
        assert http.target.seen.requests[0].request_id == "mine-1"


async def test_models(tiny_folder: Path) -> None:
    """The one model, alone and in the list; any other name is not found, slashes or not."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        listed = await client.ask("GET", "/v1/models")
        (entry,) = listed.json["data"]
        assert (entry["id"], entry["object"], entry["ready"]) == (MODEL, "model", True)
        assert (await client.ask("GET", f"/v1/models/{MODEL}")).json == entry
        for other in ("other", "org/other", f"{MODEL}/"):
            answer = await client.ask("GET", f"/v1/models/{other}")
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_probes_say_what_grpc_health_says(tiny_folder: Path) -> None:
    """Alive without a target, ready with one, and neither asks for a key."""
    async with http_gateway_alone(tiny_folder) as http:
        alive, ready = [await http.ask("GET", path) for path in ("/healthz", "/readyz")]
        assert (alive.status, ready.status) == (200, 503)
        assert ready.body == b"unready\n"
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        assert (await http.ask("GET", "/readyz")).body == b"ready\n"
        await http.target.set_serving(False)
        await http.gateway.wait_health(False)
        assert (await http.ask("GET", "/readyz")).status == 503


async def test_the_document(tiny_folder: Path) -> None:
    """It names every path that is answered, but not itself."""
    async with http_gateway_alone(tiny_folder) as http:
        document = (await http.ask("GET", "/openapi.json")).json
        assert document["openapi"].startswith("3.1")
        assert {CHAT, COMPLETIONS, "/v1/models", "/healthz", "/readyz"} <= set(document["paths"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/chat", 404),
        ("GET", f"{CHAT}/", 404),
        ("GET", "/metrics", 404),
        ("GET", CHAT, 405),
        ("DELETE", f"/v1/models/{MODEL}", 405),
        ("OPTIONS", CHAT, 405),
    ],
)
async def test_wrong_turns(tiny_folder: Path, method: str, path: str, status: int) -> None:
    """An unknown path and a wrong method get OpenAI's shape of error, and nothing for browsers."""
    async with http_gateway_alone(tiny_folder) as http:
        answer = await http.ask(method, path, headers={"Origin": "https://example.com"})
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"
        assert ("allow" in answer.headers) is (status == 405)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_every_answer_has_the_same_care(tiny_folder: Path) -> None:
    """An id, no caching, no guessing of types; no name of a server, which helps only attackers."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        for method, path, body in [
            ("GET", "/healthz", None),
            ("GET", "/nowhere", None),
            ("GET", "/v1/models", None),
            ("POST", CHAT, BODIES[CHAT]),
            ("POST", CHAT, BODIES[CHAT] | {"stream": True}),
            ("POST", CHAT, b"{"),
        ]:
            headers = (await client.ask(method, path, body)).headers
            assert len(headers["x-request-id"]) == 32
            assert headers["x-content-type-options"] == "nosniff"
            assert "no-store" in headers["cache-control"]
            assert headers["referrer-policy"] == "no-referrer"
            assert "date" in headers
            assert "server" not in headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Request-Id", "x" * 129),
        ("X-Request-Id", "two words"),
        ("X-Request-Timeout", "soon"),
        ("X-Request-Timeout", "0"),
        ("X-Request-Timeout", "-1"),
        ("X-Request-Timeout", "nan"),
        ("X-Request-Timeout", "1e3"),
        ("X-Request-Timeout", "999999"),
    ],
)
async def test_a_bad_header_is_named(tiny_folder: Path, name: str, value: str) -> None:
    """Such a request is refused before its body is looked at; the answer has an id all the same."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        answer = await http.ask("POST", CHAT, b"{", {name: value})
        assert answer.status == 400
        assert answer.error["param"] == name
        assert answer.error["message"].startswith(f"{name}: must be")
        assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_has_its_status(tiny_folder: Path, stream: bool) -> None:
    """Also one that the core finds wrong, and also where a stream was asked for."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        body = BODIES[CHAT] | {"stream": stream, "top_k": -1}
        answer = await http.ask("POST", CHAT, body)
        assert (answer.status, answer.error["param"]) == (400, "top_k")
        answer = await http.ask("POST", CHAT, body | {"top_k": 1, "model": "other"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_the_targets_refusal(tiny_folder: Path) -> None:
    """A full waiting line at the target is 429, with the seconds after which to come back."""
    script = Script(IDS, refuse=Overloaded("the waiting line is full", 1.5))
    async with http_gateway(tiny_folder, script) as http:
        answer = await http.ask("POST", CHAT, BODIES[CHAT] | {"stream": True})
        assert answer.status == 429
        assert answer.headers["retry-after"] == "2"


async def test_no_target(tiny_folder: Path) -> None:
    """503, and when to try again."""
    async with http_gateway_alone(tiny_folder) as http:
        answer = await http.ask("POST", CHAT, BODIES[CHAT])
        assert (answer.status, answer.error["type"]) == (503, "server_error")
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_deadline(tiny_folder: Path, stream: bool) -> None:
    """It travels to the target; before the first byte its end is 504, and the target is free."""
    script = Script(IDS, gate=asyncio.Event())
    async with http_gateway(tiny_folder, script) as http:
        body = BODIES[CHAT] | {"stream": stream}
        with capture_logs() as lines:
            answer = await http.ask("POST", CHAT, body, {"X-Request-Timeout": "0.3"})
            await until(lambda: http.target.seen.running == 0)
        assert answer.status == 504
        assert 0 < http.target.seen.time_remaining_s[0] <= 0.31
        (line,) = [line for line in lines if line["event"] == "request"]
        assert (line["outcome"], line["code"]) == ("failed", "deadline_exceeded")
        await until(lambda: http.gateway.num_running == 0)


async def test_an_unexpected_fault(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 500 without a word of what is inside, and the log says everything."""

    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    async with http_gateway(tiny_folder, Script(IDS)) as http:
        monkeypatch.setattr("gateway.inference.check_generate", broken)
        with capture_logs() as lines:
            answer = await http.ask("POST", CHAT, BODIES[CHAT])
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert [line for line in lines if line["event"] == "unexpected error in a handler"]


async def test_every_request_has_its_line(tiny_folder: Path) -> None:
    """Answered or refused, by the core or at the door: one line and one count each."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        with capture_logs() as lines:
            await http.ask("POST", CHAT, BODIES[CHAT])
            await http.ask("POST", COMPLETIONS, b"{")
            await http.ask("POST", CHAT, b"{}", {"Content-Type": "text/plain"})
            await http.ask("POST", CHAT, BODIES[CHAT], {"X-Request-Timeout": "x"})
            await http.ask("GET", "/v1/models")
        outcomes = [line["outcome"] for line in lines if line["event"] == "request"]
        assert outcomes == ["finished", "refused", "refused", "refused"]
        totals = http.gateway.service._metrics.totals
        assert (totals.started, totals.running) == (4, 0)


async def test_a_port_that_is_taken(tiny_folder: Path) -> None:
    """The error names the setting."""
    async with http_gateway_alone(tiny_folder) as http:
        port = http.server.port
        with pytest.raises(OSError, match=f"{HOST}:{port} for HTTP.*http_port"):
            async with http_gateway_alone(tiny_folder, http_port=port):
                pass


async def test_two_lengths_of_one_body(tiny_folder: Path) -> None:
    """Refused, and nothing behind it is a request: a proxy may go by the other length."""
    async with http_gateway(tiny_folder, Script(IDS)) as http:
        client = await http.client()
        lengths = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
        smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = await client.raw_answer(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{lengths}\r\n0\r\n\r\n".encode() + smuggled
        )
        assert answer.status == 400
        assert "Content-Length and Transfer-Encoding" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        assert await client.closed()
