"""The `openai` package when things go wrong or stop early: every failure has the right class."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.serving.errors import EngineFailed, OutriderError, Overloaded, Unavailable
from tests.support.gateways import until, write_tokenizer_folder
from tests.support.http_gateway import HttpGateway, http_gateway, http_gateway_alone
from tests.support.scripted_target import Script

pytestmark = pytest.mark.timeout(60)

IDS = tuple(range(100, 140))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


@asynccontextmanager
async def connected(gateway: HttpGateway, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that sends a request once only, unless told otherwise."""
    url = f"http://127.0.0.1:{gateway.server.port}/v1"
    chosen = {"base_url": url, "api_key": "none", "max_retries": 0} | options
    async with openai.AsyncOpenAI(**chosen) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **settings: Any) -> Any:
    """A chat completion."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]} | settings
    return await client.chat.completions.create(**asked)


async def test_32_clients_at_once(folder: Path) -> None:
    """Half of them stream; each gets its whole answer."""
    script = Script(ids=IDS, block=3, delay_s=0.001)

    async def read(client: openai.AsyncOpenAI, stream: bool) -> str:
        answer = await ask(client, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in answer])

    async with http_gateway(folder, script) as gateway, connected(gateway) as client:
        texts = await asyncio.gather(*(read(client, bool(i % 2)) for i in range(32)))
        assert gateway.target.seen.finished == 32
    assert len(set(texts)) == 1 and texts[0]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_stops_reading_frees_the_target(folder: Path, whole: bool) -> None:
    """Within moments, whether it leaves a stream or gives up waiting for a whole answer."""
    script = Script(ids=IDS, delay_s=0.01, hang_after=5)
    async with http_gateway(folder, script) as gateway, connected(gateway) as client:
        if whole:
            waiting = asyncio.create_task(ask(client))
            await until(lambda: gateway.target.seen.tokens_sent == 5)
            waiting.cancel()
        else:
            async with await ask(client, stream=True) as stream:
                assert (await anext(aiter(stream))).choices
                assert gateway.target.seen.running == 1
        await until(lambda: gateway.target.seen.cancelled == 1)
        assert gateway.target.seen.running == gateway.gateway.num_running == 0


async def test_a_timeout_frees_the_target(folder: Path) -> None:
    """The client's own patience ends, with its own error; so does the request."""
    async with (
        http_gateway(folder, Script(ids=IDS, hang_after=0)) as gateway,
        connected(gateway, timeout=0.3) as client,
    ):
        with pytest.raises(openai.APITimeoutError):
            await ask(client, stream=True)
        await until(lambda: gateway.target.seen.cancelled == 1)


async def test_a_deadline_that_the_gateway_keeps(folder: Path) -> None:
    """X-Request-Timeout ends a request with 504; the client takes it for the server's error."""
    async with (
        http_gateway(folder, Script(ids=IDS, hang_after=0)) as gateway,
        connected(gateway) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client, extra_headers={"X-Request-Timeout": "0.2"})
        assert caught.value.status_code == 504
        await until(lambda: gateway.target.seen.cancelled == 1)


@pytest.mark.parametrize("failure", [EngineFailed("the step failed"), None])
async def test_a_stream_that_breaks_is_an_error(folder: Path, failure: OutriderError) -> None:
    """What came before is kept, and nobody takes it for the whole answer."""
    script = Script(ids=IDS, fail_after=6, failure=failure)
    pieces = []
    async with http_gateway(folder, script) as gateway, connected(gateway) as client:
        stream = await ask(client, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                pieces.append(chunk.choices[0])
    assert len(pieces) >= 6
    assert all(piece.finish_reason is None for piece in pieces)
    if failure is not None:
        assert str(failure) in caught.value.message


@pytest.mark.parametrize(
    ("refusal", "kind", "status"),
    [
        (Overloaded("the waiting line is full", 2.5), openai.RateLimitError, 429),
        (Unavailable("shutting down"), openai.InternalServerError, 503),
        (EngineFailed("the step failed"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_of_a_target(
    folder: Path, refusal: OutriderError, kind: type[openai.APIStatusError], status: int,
    stream: bool,
) -> None:  # fmt: skip
    """Have their status even where a stream was asked for, and say when to come back."""
    script = Script(ids=IDS, refuse=refusal)
    async with http_gateway(folder, script) as gateway, connected(gateway) as client:
        with pytest.raises(kind) as caught:
            await ask(client, stream=stream)
    assert caught.value.status_code == status
    retry_after = {429: "3", 503: "1"}.get(status)
    assert caught.value.response.headers.get("retry-after") == retry_after


async def test_the_client_comes_back(folder: Path) -> None:
    """With its own retries a client gets past a refusal, after the time that it was told."""
    script = Script(ids=IDS, refuse=Overloaded("the waiting line is full", 0.5))
    async with http_gateway(folder, script) as gateway, connected(gateway, max_retries=2) as client:
        waiting = asyncio.create_task(ask(client, max_tokens=5))
        await until(lambda: len(gateway.target.seen.requests) == 1)
        script.refuse = None
        answer = await waiting
        assert len(gateway.target.seen.requests) == 2
    assert answer.usage.completion_tokens == 5


async def test_nobody_serves(folder: Path) -> None:
    """503 with the reason, while the model is listed all the same."""
    async with http_gateway_alone(folder) as gateway, connected(gateway) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert caught.value.status_code == 503
        assert "no target is ready" in caught.value.message
        (model,) = (await client.models.list()).data
        assert model.ready is False


async def test_keys(folder: Path, tmp_path: Path) -> None:
    """A wrong key is AuthenticationError, for the models too; the right one is answered."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"or-right").hexdigest()
    keys.write_text(f'[[keys]]\nname = "tests"\nsha256 = "{digest}"\n')
    script = Script(ids=IDS)
    async with http_gateway(folder, script, api_keys=str(keys)) as gateway:
        async with connected(gateway, api_key="or-wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await ask(client)
            assert caught.value.code == "invalid_api_key"
            assert "or-wrong" not in caught.value.message
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with connected(gateway, api_key="or-right") as client:
            assert (await ask(client, max_tokens=3)).usage.completion_tokens == 3
            assert (await client.models.list()).data[0].id == "tiny"


async def test_too_many_requests(folder: Path) -> None:
    """More than max_concurrent are refused as RateLimitError, and the others go on."""
    gate = asyncio.Event()
    script = Script(ids=IDS, gate=gate)
    async with (
        http_gateway(folder, script, max_concurrent=1) as gateway,
        connected(gateway) as client,
    ):
        first = asyncio.create_task(ask(client, max_tokens=3))
        await until(lambda: gateway.target.seen.running == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        assert "max_concurrent" in caught.value.message
        assert int(caught.value.response.headers["retry-after"]) >= 1
        gate.set()
        assert (await first).usage.completion_tokens == 3


async def test_a_shutdown_breaks_no_answer(folder: Path) -> None:
    """An open stream is read to its end while new requests are refused."""
    gate = asyncio.Event()
    async with (
        http_gateway(folder, Script(ids=IDS, gate=gate)) as gateway,
        connected(gateway) as client,
    ):
        first = asyncio.create_task(ask(client, max_tokens=3))
        await until(lambda: gateway.target.seen.running == 1)
        await gateway.gateway.service.drain()
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert caught.value.status_code == 503
        gate.set()
        assert (await first).usage.completion_tokens == 3
