"""B31 over HTTP: one bad request kills the engine.

Symptom and sources are those of the case over gRPC, beside this file.

Right: each bad request gets its 4xx within a second, in OpenAI's shape and naming the field; the
stream beside them gives what it gives alone, and the next request works; a step that fails all the
same costs only the request for which it failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.bystanders import fail_steps_of, http_stream_alone, http_stream_beside
from tests.support.http_choices import ask_choices
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, HttpAnswer, HttpGateway
from tests.support.http_stacks import full_http_stack, http_stack
from tests.support.token_streams import slow_steps

pytestmark = pytest.mark.timeout(60)

PATHS = [CHAT, COMPLETIONS]
ANSWERED_WITHIN_S = 1.0
VOCAB_SIZE = 384
BIG = 10**6

EVERYWHERE: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 2**63, "max_tokens"),
    ("logit_bias", {str(VOCAB_SIZE): 1}, "logit_bias"),
    ("logit_bias", {"49152": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias.-1"),
    ("logit_bias", {"x": 1}, "logit_bias.x"),
    ("logit_bias", {"5": 1e9}, "logit_bias[5]"),
    ("stop_token_ids", [BIG], "stop_token_ids[0]"),
    ("n", BIG, "n"),
    ("temperature", 1e400, "body"),
    ("speculation", {"max_draft_tokens": 1000}, "speculation.max_draft_tokens"),
    ("speculation", {"max_draft_tokens": -1}, "speculation.max_draft_tokens"),
    ("speculation", {"mode": "fixed", "max_draft_tokens": BIG}, "speculation.max_draft_tokens"),
    ("min_tokens", 600, "min_tokens"),
]
OF_CHATS: list[tuple[str, Any, str]] = [
    ("messages", [], "messages"),
    ("messages", [{"role": "wizard", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": "x " * 2000}], "messages"),
    ("top_logprobs", BIG, "top_logprobs"),
]
OF_TEXTS: list[tuple[str, Any, str]] = [
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", [5, VOCAB_SIZE], "prompt[1]"),
    ("prompt", [2**32 - 1], "prompt[0]"),
    ("prompt", [-1], "prompt[0]"),
    ("prompt", [5] * 600, "prompt"),
    ("logprobs", BIG, "logprobs"),
]
FIELDS = {CHAT: EVERYWHERE + OF_CHATS, COMPLETIONS: EVERYWHERE + OF_TEXTS}


def with_text(path: str, text: bytes) -> bytes:
    """A good body but for what its prompt says: the inside of a JSON string, as it stands."""
    body = json.dumps(BODIES[path]).encode()
    assert b"Hello" in body
    return body.replace(b"Hello", text)


BODIES_OF_BYTES = {
    "invalid UTF-8": (b"\xff\xfe", 400),
    "a surrogate as bytes": (b"\xed\xa0\x80", 400),
    "a lone surrogate": (b"\\ud800", 400),
    "half of a pair, the wrong way round": (b"\\udc00\\ud800", 400),
    "a control character": (b"\x00", 400),
    "20 MB": (b"x" * 20_000_000, 413),
}


async def refused(http: HttpGateway, path: str, body: object) -> HttpAnswer:
    """The answer to a bad request: at once, and of its own kind."""
    started = time.monotonic()
    answer = await http.ask("POST", path, body)
    assert time.monotonic() - started < ANSWERED_WITHIN_S
    assert 400 <= answer.status < 500
    assert answer.error["type"] == "invalid_request_error"
    return answer


@pytest.mark.parametrize("path", PATHS)
async def test_bad_requests_hurt_nobody_else(tiny_model: Path, path: str) -> None:
    """400 that names the field for each, streamed or not, while a stream of 300 tokens runs; then
    a good request is answered."""
    async with full_http_stack(tiny_model) as (http, target):
        alone = await http_stream_alone(http)
        slow_steps(target, 0.01)
        async with http_stream_beside(http, alone):
            for number, (field, value, param) in enumerate(FIELDS[path]):
                more = {"logprobs": True} if field == "top_logprobs" else {}
                body = BODIES[path] | more | {field: value, "stream": bool(number % 2)}
                error = (await refused(http, path, body)).error
                assert (error["param"] or "body") == param, (field, value)
                assert error["message"].startswith(f"{param}: ")
            for name, (text, status) in BODIES_OF_BYTES.items():
                answer = await refused(http, path, with_text(path, text))
                assert answer.status == status, name
            good = await ask_choices(http, path, {"max_tokens": 5}, stream=False)
            assert good.usage["completion_tokens"] <= 5
        load = (await target.status()).load
        assert (load.failed, load.cancelled) == (0, 0)


async def test_a_body_of_20_mb_without_a_length(tiny_model: Path) -> None:
    """A body in chunks is refused as soon as it is too long, and its client is told."""
    async with http_stack(tiny_model) as (http, _):
        client = await http.client()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        sent = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 300
        answer = await asyncio.wait_for(client.raw_answer(sent), 5)
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        good = await ask_choices(http, CHAT, {"max_tokens": 5}, stream=False)
        assert good.only.reason


async def test_odd_requests_are_answered(tiny_model: Path) -> None:
    """A prompt of one token; no drafts at all; a cap of 2**32 - 1, which ends with the context."""
    async with full_http_stack(tiny_model) as (http, _):
        odd = {"prompt": [5], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "seed": 1}
        plain = await ask_choices(http, COMPLETIONS, odd, stream=True)
        assert plain.usage["completion_tokens"] == 5
        for speculation in ({"max_draft_tokens": 0}, {"mode": "fixed", "max_draft_tokens": 0}):
            body = odd | {"speculation": speculation}
            answer = await ask_choices(http, COMPLETIONS, body, stream=True)
            assert answer.only.end == plain.only.end
            assert answer.usage["speculation"]["drafted"] == 0
        body = odd | {"prompt": [5] * 500, "max_tokens": 2**32 - 1}
        capped = await ask_choices(http, COMPLETIONS, body, stream=False)
        assert capped.only.reason == "length"
        assert capped.usage["completion_tokens"] == 12


async def test_a_step_that_fails_for_one_request_fails_only_that_one(tiny_model: Path) -> None:
    """Ten such requests, five at once and five in a row, streamed or not, are answered with 500;
    the stream beside them and the probes do not notice."""
    async with http_stack(tiny_model) as (http, target):
        alone = await http_stream_alone(http)
        slow_steps(target, 0.01)
        fail_steps_of(target, lambda name: name.startswith("poison"))

        async def ask(number: int) -> HttpAnswer:
            body = BODIES[CHAT] | {"max_tokens": 5, "stream": bool(number % 2)}
            return await http.ask("POST", CHAT, body, {"X-Request-Id": f"poison-{number}"})

        # The lines of the log would be rendered at length, on the event loop.
        with capture_logs():
            async with http_stream_beside(http, alone):
                answers = list(await asyncio.gather(*(ask(number) for number in range(5))))
                for number in range(5, 10):
                    answers.append(await ask(number))
                assert {answer.status for answer in answers} == {500}
                assert {answer.error["type"] for answer in answers} == {"server_error"}
                assert (await http.ask("GET", "/readyz")).status == 200
        assert (await target.status()).load.failed == 10
