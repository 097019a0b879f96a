"""B24 over HTTP: a part of a stop string reaches the client, or text that was held back is lost.

Symptom and sources are those of the case over gRPC, beside this file.

Right: with a match the events' text is that up to the match that begins first, no character more;
with a near miss all of it comes; never are more than (longest stop - 1) characters held; the
prompt takes no part; what is streamed is what a whole answer says; stops that are empty or too many
are refused with 400.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.tokenizer import ModelTokenizer
from tests.support.gateways import write_tokenizer_folder
from tests.support.http_choices import HttpChoice, ask_choices
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, HttpGateway, http_gateway
from tests.support.scripted_target import Script

PATHS = [CHAT, COMPLETIONS]
TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs."
MIDDLE = "fox jumps over the"
NEAR_MISS = MIDDLE[:-1] + "!"
BLOCKS = [1, 2, 3, 7]
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(folder)


@contextlib.asynccontextmanager
async def saying(folder: Path, tokenizer: ModelTokenizer) -> AsyncIterator[HttpGateway]:
    """A gateway in front of a target that says TEXT."""
    async with http_gateway(folder, Script(tokenizer.encode(TEXT))) as http:
        yield http


async def ask(http: HttpGateway, path: str, **fields: Any) -> HttpChoice:
    """The one choice, of which the stream and the whole answer tell the same."""
    body = {"seed": 1, "max_tokens": MAX_TOKENS} | fields
    streamed, whole = [
        await ask_choices(http, path, body, stream=stream) for stream in (True, False)
    ]
    assert streamed.only.end == whole.only.end
    assert streamed.usage == whole.usage
    return streamed.only


@pytest.mark.parametrize("path", PATHS)
async def test_match(folder: Path, tokenizer: ModelTokenizer, path: str) -> None:
    """A stop of several tokens from the middle, in one block of tokens or begun in one and ended
    in the next: the text up to it, or behind it if it is to be in the answer."""
    async with saying(folder, tokenizer) as http:
        for block in BLOCKS:
            http.target.script.block = block
            before = TEXT[: TEXT.index(MIDDLE)]
            answer = await ask(http, path, stop=MIDDLE)
            assert (answer.text, answer.reason) == (before, "stop")
            answer = await ask(http, path, stop=[MIDDLE], include_stop_str_in_output=True)
            assert (answer.text, answer.reason) == (before + MIDDLE, "stop")


@pytest.mark.parametrize("path", PATHS)
async def test_near_miss(folder: Path, tokenizer: ModelTokenizer, path: str) -> None:
    """A stop that differs in its last character, or that the end of the answer cuts off, holds
    nothing back for good."""
    async with saying(folder, tokenizer) as http:
        for block in BLOCKS:
            http.target.script.block = block
            for stop in (NEAR_MISS, "jugs. And"):
                answer = await ask(http, path, stop=stop)
                assert (answer.text, answer.reason) == (TEXT, "length")


@pytest.mark.parametrize("path", PATHS)
async def test_two_stops(folder: Path, tokenizer: ModelTokenizer, path: str) -> None:
    """Of two stops the one that begins earlier counts, also if the other lies inside it."""
    async with saying(folder, tokenizer) as http:
        for block in BLOCKS:
            http.target.script.block = block
            for shorter in ("over the", "jumps"):
                for stops in ([MIDDLE, shorter], [shorter, MIDDLE]):
                    answer = await ask(http, path, stop=stops)
                    assert (answer.text, answer.reason) == (TEXT[: TEXT.index(MIDDLE)], "stop")


async def test_the_prompt_takes_no_part(folder: Path, tokenizer: ModelTokenizer) -> None:
    """A stop that would begin in the prompt and end in the answer is none."""
    stop = "END of The quick"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "END of "}]
    async with saying(folder, tokenizer) as http:
        for block in BLOCKS:
            http.target.script.block = block
            answer = await ask(http, COMPLETIONS, prompt="END of ", stop=stop)
            assert (answer.text, answer.reason) == (TEXT, "length")
            answer = await ask(http, CHAT, messages=messages, stop=["assistant\nThe", stop])
            assert (answer.text, answer.reason) == (TEXT, "length")


@pytest.mark.parametrize("path", PATHS)
async def test_held_text_is_bounded(folder: Path, tokenizer: ModelTokenizer, path: str) -> None:
    """Wherever the target stands still, the client has had all but (longest stop - 1) characters
    of what was generated, and never a character of a stop that may be beginning."""
    ids = tokenizer.encode(TEXT)
    stops = [NEAR_MISS, "lazy cat"]
    async with saying(folder, tokenizer) as http:

        async def stand_still(num_tokens: int) -> None:
            http.target.script.hang_after = num_tokens
            generated = tokenizer.decode(ids[:num_tokens])
            tails = (stop[:size] for stop in stops for size in range(len(stop), 0, -1))
            held = max((len(tail) for tail in tails if generated.endswith(tail)), default=0)
            assert held < max(map(len, stops))
            client = await http.client()
            body = BODIES[path] | {"stream": True, "stop": stops, "max_tokens": MAX_TOKENS}
            await client.send("POST", path, body)
            answer, shown = await client.head(), ""
            while len(shown) < len(generated) - held:
                assert await client.part(answer)
                pieces = [event["choices"][0] for event in answer.events]
                shown = "".join(
                    piece["delta"].get("content", "") if path == CHAT else piece["text"]
                    for piece in pieces
                )
            assert shown == generated[: len(generated) - held]
            client.close()

        for num_tokens in range(1, len(ids)):
            async with asyncio.timeout(5):
                await stand_still(num_tokens)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_bad_stops_are_refused(folder: Path, path: str, stream: bool) -> None:
    """17 stops, an empty one, one of too many characters: 400 that names the field, and nothing
    reaches a target."""
    async with http_gateway(folder, Script([5, 6])) as http:
        for stops in (["a"] * 17, [""], "", ["ok", ""], ["a" * 513]):
            answer = await http.ask("POST", path, BODIES[path] | {"stop": stops, "stream": stream})
            assert answer.status == 400
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["param"].startswith("stop")
        assert http.target.seen.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_sixteen_stops_are_fine(folder: Path, tokenizer: ModelTokenizer, path: str) -> None:
    """The limit itself is allowed, and any of them ends the text."""
    async with saying(folder, tokenizer) as http:
        stops = [f"never {index}" for index in range(15)] + ["dog"]
        answer = await ask(http, path, stop=stops)
        assert (answer.text, answer.reason) == (TEXT[: TEXT.index("dog")], "stop")
