"""A long stream that runs beside what a test does, and must not notice; and steps that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.support.http_choices import HttpChoice, stream_choices
from tests.support.http_gateway import BODIES, COMPLETIONS, HttpAnswer, HttpClient, HttpGateway
from tests.support.in_process import Target
from tests.support.token_streams import TimedStream, fixed, greedy

NUM_TOKENS = 300
PROMPT = [7, 8, 9]


@contextlib.asynccontextmanager
async def stream_beside(target: Target, expected: list[int]) -> AsyncIterator[TimedStream]:
    """A long greedy stream, which runs while the block does, and then must be as it is alone."""
    stream = TimedStream()
    request = greedy(PROMPT, NUM_TOKENS, fixed(4))
    reading = asyncio.create_task(stream.run(target.stub, request, 50))
    await stream.wait_tokens(2)
    yield stream
    assert stream.finish is None, "the stream had ended before the bad requests had"
    await reading
    assert stream.ids == expected


async def http_stream_alone(http: HttpGateway) -> HttpChoice:
    """What the stream of `http_stream_beside` gives."""
    client, answer = await _begin(http)
    return await _end(client, answer)


@contextlib.asynccontextmanager
async def http_stream_beside(http: HttpGateway, expected: HttpChoice) -> AsyncIterator[None]:
    """The same over HTTP."""
    client, answer = await _begin(http)
    reading = asyncio.create_task(_end(client, answer))
    yield
    assert not reading.done(), "the stream had ended before the bad requests had"
    assert (await reading).end == expected.end


async def _begin(http: HttpGateway) -> tuple[HttpClient, HttpAnswer]:
    body = BODIES[COMPLETIONS] | {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
    }
    client = await http.client()
    await client.send("POST", COMPLETIONS, body)
    return client, await client.head()


async def _end(client: HttpClient, answer: HttpAnswer) -> HttpChoice:
    while await client.part(answer):
        pass
    return stream_choices(COMPLETIONS, answer, with_usage=False).only


def fail_steps_of(target: Target, is_poisoned: Callable[[str], bool]) -> None:
    """From now on every step with such a request in it fails, whoever else is in it."""
    batcher = target.service.batcher
    run_step = batcher._run_step

    def run(plan: Any) -> Any:
        if any(is_poisoned(share.request.request_id) for share in plan.shares):
            raise ArithmeticError("poisoned")
        return run_step(plan)

    batcher._run_step = run
