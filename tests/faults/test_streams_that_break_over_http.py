"""A stream over HTTP that breaks after its first byte.

Symptom: the status has been sent, so a stream that cannot go on is closed as if it were whole, and
its client takes half an answer for an answer.

Right: whatever broke it, the last event says so, no choice without its end gets one, no mark of the
end comes, and the body has no proper end; the target's call is over and the next request works.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outrider.serving.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable
from tests.support.gateways import until, write_tokenizer_folder
from tests.support.http_choices import DONE, ask_choices
from tests.support.http_gateway import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Broken,
    HttpAnswer,
    HttpGateway,
    http_gateway,
)
from tests.support.scripted_target import Script

PATHS = [CHAT, COMPLETIONS]
IDS = [5, 6, 7] * 5
NUM_TOKENS = 3
FAILURES = {
    "no finish": None,
    "a failed step": EngineFailed("a step failed"),
    "a target that goes": Unavailable("gone"),
    "a refusal that comes too late": Overloaded("full", 1.0),
    "a fault that is not the client's any more": InvalidRequest("text", "is bad"),
}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


async def broken_stream(
    http: HttpGateway, path: str, after_first: Callable[[], Awaitable[None]] | None = None
) -> HttpAnswer:
    """What came of a stream that has begun, and whose body has no end."""
    client = await http.client()
    await client.send("POST", path, BODIES[path] | WITH_USAGE)
    answer = await client.head()
    assert answer.status == 200
    if after_first is not None:
        await after_first()
    with pytest.raises(Broken):
        while await client.part(answer):
            pass
    return answer


def check_broken(answer: HttpAnswer) -> None:
    """An error in OpenAI's shape behind good events, and nothing that looks like an end."""
    *events, last = answer.events
    assert set(last) == {"error"}
    assert last["error"]["message"]
    assert DONE not in events
    assert events
    for event in events:
        (choice,) = event["choices"]
        assert choice["finish_reason"] is None
        assert event["usage"] is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_of_the_target(folder: Path, path: str, failure: str) -> None:
    """Whatever its status is, and if the target only stops in the middle."""
    script = Script(IDS, fail_after=NUM_TOKENS, failure=FAILURES[failure])
    async with http_gateway(folder, script) as http:
        check_broken(await broken_stream(http, path))
        await until(lambda: http.gateway.num_running == 0)
        script.fail_after = None
        again = await ask_choices(http, path, {}, stream=True)
        assert again.usage["completion_tokens"] == len(IDS)


@pytest.mark.parametrize("path", PATHS)
async def test_a_target_that_dies(folder: Path, path: str) -> None:
    """Its connections are cut in the middle of an answer."""
    async with http_gateway(folder, Script(IDS, hang_after=NUM_TOKENS)) as http:
        check_broken(await broken_stream(http, path, http.target.stop))
        await until(lambda: http.gateway.num_running == 0)


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_is_never_half_of_one(folder: Path, path: str) -> None:
    """Where no stream was asked for, the same failures are an error with a status of its own."""
    for failure in FAILURES.values():
        script = Script(IDS, fail_after=NUM_TOKENS, failure=failure)
        async with http_gateway(folder, script) as http:
            answer = await http.ask("POST", path, BODIES[path])
            assert answer.status >= 400
            assert answer.error["message"]


async def test_http_1_0(folder: Path) -> None:
    """Where only the connection's end ends a body, the error is the last that comes."""
    script = Script(IDS, fail_after=NUM_TOKENS, failure=EngineFailed("a step failed"))
    async with http_gateway(folder, script) as http:
        body = json.dumps(BODIES[COMPLETIONS] | WITH_USAGE).encode()
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\n"
        client = await http.client()
        await client.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        data = await client.reader.read()
        _, _, sent = data.partition(b"\r\n\r\n")
        check_broken(HttpAnswer(200, {}, sent))
