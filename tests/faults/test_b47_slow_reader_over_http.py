"""B47 over HTTP: a reader that is slow, or has stopped.

Right: the others keep their speed; what is made for a client that does not read is bounded, all
buffers between it and the engine together; when it reads on, nothing is missing or doubled; when it
never does, its connection is cut, so that no client can take what it has for the whole, the log
says why, and its blocks and its place are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.gateways import gateway_on, until
from tests.support.http_gateway import CHAT, MODEL, HttpGateway
from tests.support.http_streams import HttpStream, http_front
from tests.support.in_process import Target, running_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_streams import assert_counts_balance, quiet_status

STREAM_TOKENS = 64
TOP = 20
MAX_STALLED_BYTES = 1_000_000
RECEIVE_BUFFER = 4096
"""Else the kernel reads for a client that does not."""

Tokens = list[tuple[str, float]]


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    num_tokens: int
    num_stalled: int
    num_slow: int
    num_normal: int
    stall_s: float
    resumed_after_s: float
    """When one of the stalled ones reads on; less than `stall_s`."""
    slow_read_s: float


SMALL = Sizes(800, 2, 1, 2, stall_s=2.5, resumed_after_s=1.5, slow_read_s=0.3)
FULL = Sizes(4000, 5, 5, 10, stall_s=15.0, resumed_after_s=5.0, slow_read_s=1.0)


def content_of(number: int) -> str:
    """What one client says; nobody else begins alike."""
    return f"{chr(ord('a') + number)} quick fox"


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    """A long answer with many log-probabilities, so that a token is more than a kilobyte."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content_of(number)}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": TOP,
        "speculation": {"mode": "off"},
    }


def tokens_of(choices: Sequence[dict[str, Any]]) -> Tokens:
    """All tokens of one choice, however it was told."""
    return [
        (token["token"], token["logprob"])
        for choice in choices
        if choice["logprobs"]
        for token in choice["logprobs"]["content"]
    ]


def tokens_read(stream: HttpStream) -> Tokens:
    """So far."""
    events = [event for event in stream.events if event.get("choices")]
    return tokens_of([event["choices"][0] for event in events])


@dataclass(frozen=True)
class Stack:
    """A gateway before a real target."""

    http: HttpGateway
    target: Target
    sizes: Sizes

    async def open(self, number: int, **options: Any) -> HttpStream:
        """A stream."""
        body = body_of(number, self.sizes.num_tokens)
        return await HttpStream.open(self.http.server.port, body, CHAT, **options)

    async def whole(self, number: int) -> Tokens:
        """The tokens of a whole answer."""
        answer = await self.http.ask("POST", CHAT, body_of(number, self.sizes.num_tokens))
        assert answer.status == 200
        return tokens_of(answer.json["choices"])

    def num_made(self, number: int) -> int | None:
        """Tokens that the engine has made for one client; None when it runs no more."""
        tokenizer = self.http.gateway.service._inference.model.tokenizer
        prompt = tokenizer.encode_chat((("user", content_of(number)),), None)
        for each in self.target.service.batcher.scheduler.running:
            if list(each.sequence.token_ids[: len(prompt)]) == prompt:
                return each.num_generated
        return None

    async def speed_of(self, numbers: Sequence[int], expected: list[Tokens]) -> float:
        """Tokens a second of a stream, of those clients at once, who read at once."""
        started_s = time.monotonic()
        streams = await asyncio.gather(*map(self.open, numbers))
        await asyncio.gather(*(stream.read_all() for stream in streams))
        speed = self.sizes.num_tokens / (time.monotonic() - started_s)
        for number, stream in zip(numbers, streams, strict=True):
            assert stream.ended
            assert tokens_read(stream) == expected[number]
            stream.close()
        return speed


async def read_slowly(stream: HttpStream, every_s: float) -> None:
    """A part now and then, for ever."""
    while await stream.read():
        await asyncio.sleep(every_s)


def check_cut_off(stream: HttpStream, expected: Tokens) -> None:
    """No good end, behind tokens without a gap."""
    assert stream.broken, "a stream that was cut off ended as if it were whole"
    assert b"[DONE]" not in stream.answer.body
    tokens = tokens_read(stream)
    assert len(tokens) < len(expected)
    assert tokens == expected[: len(tokens)]


async def check(model: Path, sizes: Sizes, *, timed: bool = False) -> float:
    """The whole story; returns the normal readers' speed, where `timed` as a share of what it is
    without those who are slow or stay away. Who reads on has a claim to a part of every step."""
    count = sizes.num_normal + sizes.num_slow + sizes.num_stalled
    normal = range(sizes.num_normal)
    slow_numbers = range(sizes.num_normal, sizes.num_normal + sizes.num_slow)
    resumed, *gone_numbers = range(count - sizes.num_stalled, count)
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(
            running_target(
                model,
                kv_tokens=(sizes.num_tokens + 64) * count,
                stream_tokens=STREAM_TOKENS,
                stall_s=10 * sizes.stall_s,  # the gateway's shall count
                prefix_cache=False,
            )
        )
        gateway = await stack.enter_async_context(
            gateway_on(model, [target.address], http_port=0, stall_s=sizes.stall_s)
        )
        http = await stack.enter_async_context(http_front(gateway))
        await gateway.wait_health(True)
        this = Stack(http, target, sizes)
        expected = await asyncio.gather(*map(this.whole, range(count)))
        alone = await this.speed_of([*normal, resumed], expected) if timed else 1.0
        lines = stack.enter_context(capture_logs())

        stalled = [
            await this.open(each, receive_buffer=RECEIVE_BUFFER)
            for each in (resumed, *gone_numbers)
        ]
        for stream in stalled:
            for _ in range(3):
                await stream.read()
        stalled_s = time.monotonic()
        slow = [await this.open(each, receive_buffer=RECEIVE_BUFFER) for each in slow_numbers]
        slowly = [asyncio.create_task(read_slowly(each, sizes.slow_read_s)) for each in slow]
        beside = asyncio.create_task(this.speed_of(normal, expected))
        await asyncio.sleep(stalled_s + sizes.resumed_after_s - time.monotonic())
        for number, stream in zip((resumed, *gone_numbers), stalled, strict=True):
            made, tokens = this.num_made(number), tokens_read(stream)
            assert made is not None, "it was made to its end for somebody who does not read"
            bytes_a_token = len(stream.answer.body) / max(1, len(tokens))
            assert (made - len(tokens)) * bytes_a_token < MAX_STALLED_BYTES

        back, *gone = stalled
        await back.read_all()
        assert back.ended
        assert tokens_read(back) == expected[resumed]
        share = await beside / alone

        async with asyncio.timeout(sizes.stall_s + 10):
            while any(this.num_made(number) is not None for number in gone_numbers):
                await asyncio.sleep(0.02)
        for number, stream in zip(gone_numbers, gone, strict=True):
            await stream.read_all()
            check_cut_off(stream, expected[number])
        unread = [each for each in lines if "was not read for" in each.get("error", "")]
        assert len([each for each in unread if each["event"] == "request"]) >= len(gone)
        for task, number, stream in zip(slowly, slow_numbers, slow, strict=True):
            # Whether they are slow or have stopped shows only when they have taken enough.
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                tokens = tokens_read(stream)
                assert tokens == expected[number][: len(tokens)]
            elif not stream.ended:
                check_cut_off(stream, expected[number])
        for stream in (*slow, *stalled):
            stream.close()
        assert_counts_balance(await quiet_status(target))
        await until(lambda: not http.gateway.num_running, timeout_s=2)
    return share


@pytest.mark.timeout(180)
async def test_slow_and_stalled_readers_cost_the_others_nothing(tmp_path: Path) -> None:
    """Five streams: two stop reading, one of them for a while only, and one is slow."""
    await check(make_tiny_model(tmp_path / "tiny", max_len=1024), SMALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_streams_of_4000_tokens(tmp_path: Path) -> None:
    """Five stop reading, five are slow, and the other ten keep at least 90 % of their speed."""
    share = await check(make_tiny_model(tmp_path / "tiny", max_len=8192), FULL, timed=True)
    assert share >= 0.9
