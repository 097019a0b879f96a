"""B43 through HTTP, at the door: a request may fail before the core has heard of it.

At its headers, its size, its JSON, its key. Right: it has its one span all the same, with the
status that the client got and a reason that quotes nothing of what it sent; what no path takes is
no request for text and has none.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from outrider.serving.errors import Overloaded
from tests.support.doors import chat_body, http_client, http_port
from tests.support.gateways import Gateway, gateway_on, gateway_with, until
from tests.support.http_gateway import CHAT, COMPLETIONS, HttpAnswer
from tests.support.otlp import Spans
from tests.support.request_spans import Told, assert_of_http, failed, refused, told
from tests.support.scripted_target import Script

GOOD = chat_body("river", 9)
SAID = "or-a-secret"
NO_ROOM = Script([5], refuse=Overloaded("the waiting line is full", 1))


@dataclass(frozen=True)
class Case:
    """What is sent, and how it ends."""

    status: int
    code: str
    body: object = field(default_factory=lambda: GOOD)
    path: str = CHAT
    headers: dict[str, str] = field(default_factory=dict)
    script: Script = field(default_factory=lambda: Script([5]))
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """What the span says of it, where that is to be seen."""

    @property
    def told(self) -> Told:
        """Of the span."""
        return failed(self.code) if self.status >= 500 else refused(self.code)


def bad(status: int, body: object = GOOD, reason: str = "", **more: Any) -> Case:
    """A request that is wrong in itself."""
    return Case(status, "invalid_argument", body, reason=reason, **more)


CASES = {
    "value": bad(400, GOOD | {"top_p": 7}, "top_p is not valid"),
    "value of the core": bad(400, GOOD | {"min_tokens": 10}),
    "unsupported": bad(400, GOOD | {"tools": [SAID]}, "tools is not valid"),
    "unknown field": bad(400, GOOD | {SAID: 1}, "body is not valid"),
    "unknown field within": bad(400, GOOD | {"speculation": {SAID: 1}}, "speculation is not valid"),
    "unknown field of a message": bad(
        400, GOOD | {"messages": [{SAID: 1}]}, "messages[0] is not valid"
    ),
    "unknown field of a part": bad(
        400,
        GOOD | {"messages": [{"role": "user", "content": [{SAID: 1}]}]},
        "messages[0].content[0] is not valid",
    ),
    "bias": bad(400, GOOD | {"logit_bias": {SAID: 1}}, "logit_bias is not valid"),
    "twice": bad(400, f'{{"{SAID}": 1, "{SAID}": 2}}'.encode(), "body is not valid"),
    "half a pair": bad(400, f'{{"{SAID}": "\\ud800"}}'.encode(), "body is not valid"),
    "role": bad(400, GOOD | {"messages": [{"role": SAID, "content": SAID}]}),
    "broken JSON": bad(400, f'{{"model": {SAID}'.encode(), "body is not valid"),
    "no UTF-8": bad(400, b"\xff" + SAID.encode(), "body is not valid"),
    "of completions": bad(400, b"{", path=COMPLETIONS),
    "deadline": bad(400, headers={"X-Request-Timeout": SAID}),
    "id": bad(400, headers={"X-Request-Id": f"{SAID} {SAID}"}),
    "no body": bad(415, None),
    "type": bad(415, headers={"Content-Type": SAID}, reason="Unsupported Media Type"),
    "coding": bad(415, headers={"Content-Encoding": SAID}, reason="Unsupported Media Type"),
    "model": Case(404, "not_found", GOOD | {"model": SAID}),
    "size": bad(
        413,
        b" " * 300_000,
        settings={"max_message_bytes": 262_144, "max_prompt_bytes": 60_000},
    ),
    "line": Case(429, "resource_exhausted", script=NO_ROOM),
    "key": Case(401, "unauthenticated", headers={"Authorization": f"Bearer {SAID}"}),
    "no target": Case(503, "unavailable"),
    "no time": Case(
        504,
        "deadline_exceeded",
        headers={"X-Request-Timeout": "0.1"},
        script=Script([5], hang_after=0),
    ),
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with one key, that nobody has."""
    file = tmp_path / "keys.toml"
    sha256 = hashlib.sha256(b"or-b43").hexdigest()
    file.write_text(f'[[keys]]\nname = "b43"\nsha256 = "{sha256}"\n')
    return str(file)


async def ask(gateway: Gateway, case: Case) -> HttpAnswer:
    """One request on a connection of its own."""
    async with http_client(http_port(gateway)) as client:
        return await client.ask("POST", case.path, case.body, case.headers)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_refusal_has_its_span(tiny_folder: Path, keys: str, case: Case) -> None:
    """One, with the status of the answer; neither it nor the log quotes what was sent."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0} | case.settings
    if case.status == 401:
        settings["api_keys"] = keys
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, case.script, **settings) as (gateway, target):
            if case.status == 503:
                await target.set_serving(False)
                await gateway.wait_health(False)
            answer = await ask(gateway, case)
            assert answer.status == case.status, answer.body
            await spans.wait(lambda: spans.all, 2)
            await until(lambda: target.seen.running == 0)
            totals = gateway.service._metrics.totals
            assert (totals.started, totals.running) == (1, 0)
    (span,) = spans.all
    assert spans.num_started == 1
    assert told(span) == case.told
    assert_of_http(span, case.status, case.path)
    assert span.attributes["outrider.request_id"] == answer.headers["x-request-id"]
    if case.reason:
        assert span.status_message == case.reason
    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["code"], line["error"]) == (case.code, span.status_message)
    if case.status != 404:  # whose span says which model was asked for
        assert SAID not in str(span)
    assert SAID not in str(lines)


async def test_one_too_many(tiny_folder: Path) -> None:
    """Who finds the gateway full has a span, beside the one of who fills it."""
    spans, script = Spans(), Script([5], gate=asyncio.Event())
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0, "max_concurrent": 1}
    async with gateway_with(tiny_folder, script, **settings) as (gateway, target):
        first = asyncio.create_task(ask(gateway, Case(200, "")))
        await until(lambda: target.seen.running == 1)
        assert (await ask(gateway, Case(429, ""))).status == 429
        (span,) = spans.all
        script.gate.set()
        assert (await first).status == 200
        await spans.wait(lambda: len(spans.all) == 2, 2)
    assert told(span) == refused("resource_exhausted")
    assert_of_http(span, 429)
    assert_of_http(spans.all[1], 200)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"/v1/{SAID}", 404),
        ("GET", CHAT, 405),
        ("GET", "/v1/models", 200),
        ("GET", f"/v1/models/{SAID}", 404),
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 503),
    ],
)
async def test_what_asks_for_no_text_has_no_span(
    tiny_folder: Path, method: str, path: str, status: int
) -> None:
    """Else anybody could fill the traces with what there is not, and probes with themselves."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0}
    with capture_logs() as lines:
        async with gateway_on(tiny_folder, ["127.0.0.1:1"], **settings) as gateway:
            async with http_client(http_port(gateway)) as client:
                assert (await client.ask(method, path)).status == status
            assert gateway.service._metrics.totals.started == 0
    assert spans.num_started == 0
    assert SAID not in str(lines)
