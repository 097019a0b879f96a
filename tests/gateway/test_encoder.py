"""The two lanes to the tokenizer: who waits for whom, and who is refused before that."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from gateway.encoder import Encoder
from gateway.requests import Prompt
from gateway.tokenizer import ModelTokenizer, TooLong
from outrider.serving.errors import InvalidRequest, Overloaded
from protos.outrider.v1 import inference_pb2 as pb
from tests.support.gateways import MAX_MODEL_LEN, gateway_with, until, write_tokenizer_folder
from tests.support.scripted_target import Script

LONG = 20_000
WAIT_S = 10


class GatedTokenizer:
    """One id a text; a long text takes until a permit is there."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.running = threading.Event()
        self.done: list[str] = []

    def check_fits(self, text: str, max_tokens: int) -> None:
        """A byte is a token."""
        if len(text) > max_tokens:
            raise TooLong(f"at most {max_tokens}")

    def encode(self, text: str) -> list[int]:
        """The text's length."""
        if len(text) >= LONG:
            self.running.set()
            assert self.permits.acquire(timeout=WAIT_S)
        self.done.append(text)
        return [len(text)]

    def token(self, token_id: int) -> str:
        """As it is."""
        return str(token_id)


@pytest.fixture
async def tokenizer() -> AsyncIterator[GatedTokenizer]:
    """Everybody is let through at the end."""
    gated = GatedTokenizer()
    yield gated
    gated.permits.release(100)


@pytest.fixture
async def encoder(tokenizer: GatedTokenizer) -> AsyncIterator[Encoder]:
    """An encoder that lets 80,000 bytes wait."""
    made = Encoder(tokenizer, LONG // 4)
    yield made
    tokenizer.permits.release(100)
    made.close()


def long_text(letter: str = "x") -> Prompt:
    """A quarter of the line."""
    return Prompt("text", text=letter * LONG)


async def begin(encoder: Encoder, prompt: Prompt) -> asyncio.Task[list[int]]:
    """An encoding that has come as far as it can without the tokenizer."""
    task = asyncio.create_task(encoder.encode(prompt))
    await asyncio.sleep(0)
    return task


async def test_short_texts_pass_long_ones(encoder: Encoder, tokenizer: GatedTokenizer) -> None:
    """While one long text is at work and others wait, short texts and chats are answered."""
    tasks = [await begin(encoder, long_text()) for _ in range(5)]
    for _ in range(3):
        assert await asyncio.wait_for(encoder.encode(Prompt("text", text="hi")), WAIT_S) == [2]
    assert not any(task.done() for task in tasks)
    tokenizer.permits.release(5)
    assert await asyncio.gather(*tasks) == [[LONG]] * 5


async def test_the_line_is_bounded(encoder: Encoder, tokenizer: GatedTokenizer) -> None:
    """One at work and four that wait; the next one is told to come again, and can, later."""
    tasks = [await begin(encoder, long_text()) for _ in range(5)]
    with pytest.raises(Overloaded, match="80000 bytes of long texts wait") as caught:
        await encoder.encode(long_text())
    assert caught.value.retry_after_s > 0
    tokenizer.permits.release()
    await asyncio.wait_for(tasks[0], WAIT_S)
    last = await begin(encoder, long_text())
    tokenizer.permits.release(5)
    assert await asyncio.gather(*tasks[1:], last) == [[LONG]] * 5


async def test_who_leaves_leaves_the_line(encoder: Encoder, tokenizer: GatedTokenizer) -> None:
    """Its text is never tokenized, and its place is free at once."""
    first, *waiting = [await begin(encoder, long_text(letter)) for letter in "abcde"]
    waiting[1].cancel()
    await asyncio.wait({waiting[1]})
    last = await begin(encoder, long_text("f"))
    tokenizer.permits.release(6)
    await asyncio.gather(first, waiting[0], *waiting[2:], last)
    assert [text[0] for text in tokenizer.done] == list("abdef")


async def test_who_leaves_at_work_is_waited_for(
    encoder: Encoder, tokenizer: GatedTokenizer
) -> None:
    """Nobody is handed to a thread that is still busy: those could not leave any more."""
    first, second = [await begin(encoder, long_text(letter)) for letter in "ab"]
    assert await asyncio.to_thread(tokenizer.running.wait, WAIT_S)
    first.cancel()
    await asyncio.wait({first})
    second.cancel()
    await asyncio.wait({second})
    third = await begin(encoder, long_text("c"))
    tokenizer.permits.release(2)
    assert await asyncio.wait_for(third, WAIT_S) == [LONG]
    assert [text[0] for text in tokenizer.done] == ["a", "c"]


async def test_what_cannot_fit_is_refused_at_once(
    encoder: Encoder, tokenizer: GatedTokenizer
) -> None:
    """However long the line is, and without a look at its tokens."""
    tasks = [await begin(encoder, long_text()) for _ in range(5)]
    with pytest.raises(InvalidRequest, match="text: at most 256"):
        await encoder.encode(long_text("y"), 256)
    tokenizer.permits.release(5)
    await asyncio.gather(*tasks)
    assert not any(text.startswith("y") for text in tokenizer.done)


def longest_token(folder: Path) -> str:
    """As the vocabulary spells it, a character a byte."""
    return max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(), key=len)


def test_what_is_refused_unseen_cannot_fit(tiny_folder: Path) -> None:
    """The limit is what the longest token alone would need, and not a byte less."""
    tokenizer, size = ModelTokenizer.load(tiny_folder), 100
    limit = size * len(longest_token(tiny_folder))
    tokenizer.check_fits("x" * limit, size)
    for text in ("x" * (limit + 1), "\u00e9" * (limit // 2 + 1)):
        with pytest.raises(TooLong, match=f"at most {limit} bytes"):
            tokenizer.check_fits(text, size)


def test_no_text_is_refused_that_fits(smollm2_folder: Path) -> None:
    """Nor one of control characters, for some of which SmolLM2 has no token."""
    tokenizer, rng = ModelTokenizer.load(smollm2_folder), random.Random(0)
    dropped = [chr(byte) for byte in range(128) if not tokenizer.encode(chr(byte))]
    assert dropped
    pieces = [*dropped, "\n" + " " * 80, "#" * 80, "<|endoftext|>", "\u00f8", "\U000e0041", "word "]
    for _ in range(200):
        text = rng.choice(pieces) * rng.randrange(200) + rng.choice(pieces) * rng.randrange(200)
        tokenizer.check_fits(text, len(tokenizer.encode(text)))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
    ],
)
def test_where_texts_may_shrink_nothing_is_refused_unseen(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """A normalizer or a splitter may drop any part of a text."""
    path = write_tokenizer_folder(tmp_path / "m") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    ModelTokenizer.load(tmp_path / "m").check_fits("x" * 10**6, 1)


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_the_gateway_names_the_field_and_the_limit(tiny_folder: Path, kind: str) -> None:
    """The context in copies of the longest token. Tokenize takes such a text all the same."""
    limit = len(longest_token(tiny_folder)) * MAX_MODEL_LEN
    text = "x" * (limit + 1)
    given = (
        {"text": text}
        if kind == "text"
        else {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])}
    )
    async with gateway_with(tiny_folder, Script([5])) as (gateway, target):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ask(pb.GenerateRequest(**given))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = str(caught.value.details())
        assert details.startswith(f"{kind}: at most {limit} bytes can fit in the context of 256")
        assert not target.seen.requests
        answer = await gateway.stub.Tokenize(pb.TokenizeRequest(**given), timeout=WAIT_S)
        assert len(answer.ids) == len(answer.tokens) > MAX_MODEL_LEN


async def test_a_client_that_leaves_frees_its_place(tiny_folder: Path) -> None:
    """Over the wire: long ones that wait hold up no short one, and cancelled ones wait no more."""
    async with gateway_with(tiny_folder, Script([5])) as (gateway, _):
        request = pb.TokenizeRequest(text="a b" * 330_000)
        calls = [gateway.stub.Tokenize(request, timeout=60) for _ in range(3)]
        await until(lambda: gateway.num_running == 3)
        assert (await gateway.ask(pb.GenerateRequest(text="hi"))).ids == [5]
        for call in calls:
            call.cancel()
        await until(lambda: gateway.num_running == 0)
        assert gateway.service._inference._encoder._long._waiting_bytes == 0
