"""Calls that are made again: which ones, how often, and how long the client waits in between."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from outrider.client import (
    Client,
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    Retries,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from tests.support.played_gateway import PlayedGateway, chunk, finish, played_gateway

QUICK = Retries(attempts=4, first_s=0.01)
GOOD = [chunk("good"), finish()]
AWAY = [Unavailable("away")]


@contextlib.asynccontextmanager
async def asking(
    *plays: Sequence[object], retries: Retries = QUICK
) -> AsyncIterator[tuple[PlayedGateway, Client]]:
    """A gateway that plays these, and its client."""
    async with (
        played_gateway(*plays) as gateway,
        Client(gateway.address, retries=retries) as client,
    ):
        yield gateway, client


@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("full", 0.01)])
async def test_tries_again_before_the_first_token(error: OutriderError) -> None:
    """A gateway that is away or full for a moment costs its client nothing but time."""
    async with asking([error], [error], GOOD) as (gateway, client):
        answer = await client.generate("x")
    assert answer.text == "good"
    assert len(gateway.requests) == 3


async def test_calls_without_text_are_made_again_too() -> None:
    """All methods follow the same rule."""
    async with asking(AWAY, AWAY, []) as (gateway, client):
        assert await client.models() == []
    assert len(gateway.requests) == 3


async def test_never_after_something_was_delivered() -> None:
    """What the program has seen is not made again: it gets the error behind it."""
    async with asking([chunk("half"), *AWAY], GOOD) as (gateway, client):
        stream = client.stream("x")
        assert (await anext(stream)).text == "half"
        with pytest.raises(Unavailable, match="away"):
            await anext(stream)
        assert [piece async for piece in stream] == []  # it stays ended
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("n", "too many"),
        Unauthenticated("no key"),
        NotFound("no such model"),
        TooLarge("too much"),
        DeadlinePassed("too late"),
        EngineFailed("a step failed"),
    ],
)
async def test_what_would_fail_again_is_not_tried_again(error: OutriderError) -> None:
    """It comes out as the error that the gateway raised, at once."""
    async with asking([error], GOOD) as (gateway, client):
        with pytest.raises(type(error), match=str(error)):
            await client.generate("x")
    assert len(gateway.requests) == 1


async def test_gives_up() -> None:
    """After its attempts the last error comes out; with one attempt nothing is tried again."""
    for attempts in (1, 3):
        retries = Retries(attempts=attempts, first_s=0.01)
        async with asking(AWAY, retries=retries) as (gateway, client):
            with pytest.raises(Unavailable, match="away"):
                await client.generate("x")
        assert len(gateway.requests) == attempts


async def test_a_wait_past_the_deadline_is_not_begun() -> None:
    """The program gets the error and its delay, and the time that is left."""
    async with asking([Overloaded("full", 4.0)], GOOD) as (gateway, client):
        with pytest.raises(Overloaded) as caught:
            await client.generate("x", timeout_s=3)
    assert caught.value.retry_after_s == 4.0
    assert len(gateway.requests) == 1


async def test_all_tries_share_one_deadline() -> None:
    """The second call has less time than the first, by the wait at least."""
    async with asking([Overloaded("full", 0.2)], GOOD) as (gateway, client):
        await client.generate("x", timeout_s=3)
    first_s, second_s = gateway.time_remaining_s
    assert first_s - second_s >= 0.2 - 0.02  # a deadline travels in hundredths of a second


def test_waits_grow_with_full_jitter_and_have_a_limit() -> None:
    """Anything between nothing and a bound that doubles, at least what was asked for, and no try
    at all for a gateway that asks for too long."""
    retries = Retries(attempts=9, first_s=0.2, longest_s=1.0)
    for num_failed, bound_s in [(1, 0.2), (2, 0.4), (3, 0.8), (4, 1.0), (8, 1.0)]:
        waits = [retries.wait_s(num_failed, Unavailable("")) for _ in range(300)]
        assert 0 <= min(waits) < bound_s / 4 and bound_s * 3 / 4 < max(waits) <= bound_s
        waits = [retries.wait_s(num_failed, Overloaded("", 0.7)) for _ in range(300)]
        assert 0.7 <= min(waits) <= max(waits) <= min(1.0, 0.7 + bound_s)
    assert retries.wait_s(9, Unavailable("")) is None
    assert retries.wait_s(1, Overloaded("", 1.1)) is None
