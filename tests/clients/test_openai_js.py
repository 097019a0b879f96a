"""The `openai` package for Node.js: whole answers, streams, and failures at any moment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.serving.errors import EngineFailed, Overloaded
from tests.clients.conftest import Addresses
from tests.support import node
from tests.support.gateways import until, write_tokenizer_folder
from tests.support.http_gateway import HttpGateway, http_gateway
from tests.support.scripted_target import Script

pytestmark = pytest.mark.timeout(240)  # npm's download and the start of three services

CLIENT = Path(__file__).parent / "openai_js"
CHAT = {"messages": [{"role": "user", "content": "The quick brown fox"}]}
SETTINGS = {"model": "tiny", "seed": 7, "max_tokens": 20, "ignore_eos": True}
IDS = tuple(range(100, 140))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its packages."""
    return node.project(CLIENT, tmp_path_factory.mktemp("js"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


def run(client: Path, url: str, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each job."""
    done = node.run(client, "client.mjs", url, json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def run_at(client: Path, gateway: HttpGateway, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for a gateway inside this process."""
    url = f"http://127.0.0.1:{gateway.server.port}/v1"
    return await asyncio.to_thread(run, client, url, *jobs)


def chat(**settings: Any) -> dict[str, Any]:
    """A job."""
    return {"call": "chat", "body": {**CHAT, **SETTINGS, **settings}}


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Of a streamed chat."""
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def test_answers(client: Path, gateway: Addresses) -> None:
    """A chat, whole and streamed, is the same text; plain completions and models are read too."""
    whole, streamed, plain, models, model = run(
        client,
        gateway.http,
        chat(logprobs=True, top_logprobs=2),
        chat(stream=True, stream_options={"include_usage": True}),
        {"call": "completions", "body": {**SETTINGS, "prompt": "The quick"}},
        {"call": "models"},
        {"call": "model", "body": gateway.model},
    )
    (choice,) = whole["answer"]["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 20
    *chunks, last = streamed["chunks"]
    assert text_of(chunks) == choice["message"]["content"]
    assert last["usage"]["completion_tokens"] == whole["answer"]["usage"]["completion_tokens"] == 20
    assert plain["answer"]["usage"]["completion_tokens"] == 20
    assert [each["id"] for each in models["answer"]] == [model["answer"]["id"]] == [gateway.model]


def test_errors(client: Path, gateway: Addresses) -> None:
    """Each by its class, with the field that is at fault."""
    bad, tools, unknown = run(
        client,
        gateway.http,
        chat(temperature=-1),
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        chat(model="gpt-4o", stream=True),
    )
    for result, param in ((bad, "temperature"), (tools, "tools")):
        assert result["error"]["name"] == "BadRequestError"
        assert result["error"]["param"] == param
    assert unknown["error"]["name"] == "NotFoundError"
    assert unknown["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("failure", [EngineFailed("the step failed"), None])
async def test_a_stream_that_breaks(
    client: Path, folder: Path, failure: EngineFailed | None
) -> None:
    """It is an error there as well, behind the pieces that came."""
    script = Script(ids=IDS, fail_after=6, failure=failure)
    async with http_gateway(folder, script) as gateway:
        (result,) = await run_at(client, gateway, chat(stream=True))
    assert text_of(result["chunks"])
    assert result["error"]["name"] == "APIError"
    if failure is not None:
        assert str(failure) in result["error"]["message"]


async def test_a_refusal(client: Path, folder: Path) -> None:
    """RateLimitError, with the time to come back."""
    script = Script(ids=IDS, refuse=Overloaded("the waiting line is full", 2.5))
    async with http_gateway(folder, script) as gateway:
        (result,) = await run_at(client, gateway, chat(stream=True))
    assert result["error"]["name"] == "RateLimitError"
    assert (result["error"]["status"], result["error"]["retryAfter"]) == (429, "3")


async def test_leaving_a_stream_frees_the_target(client: Path, folder: Path) -> None:
    """The request ends with it."""
    script = Script(ids=IDS, delay_s=0.01, hang_after=8)
    async with http_gateway(folder, script) as gateway:
        running = asyncio.create_task(
            run_at(client, gateway, {**chat(stream=True), "leaveAfter": 3})
        )
        await until(lambda: gateway.target.seen.cancelled == 1, timeout_s=30)
        (result,) = await running
    assert len(result["chunks"]) == 3
