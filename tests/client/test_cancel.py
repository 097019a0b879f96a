"""Programs that leave in the middle: the gateway and the target behind it stop at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.client import CallFailed, Chunk, Client, DeadlinePassed, Retries, Stream, Unavailable
from tests.support.gateways import gateway_with, until
from tests.support.played_gateway import played_gateway
from tests.support.scripted_target import Script, ScriptedTarget

LONG = Script([70] * 200, hang_after=2)


async def cancelled(target: ScriptedTarget) -> None:
    """Return when the target has lost its one request."""
    await until(lambda: (target.seen.cancelled, target.seen.running) == (1, 0), timeout_s=2)


async def first_of(stream: Stream) -> Chunk:
    """The first piece; leaves the loop like a program does."""
    async for piece in stream:
        return piece
    raise AssertionError("the stream was empty")


@pytest.mark.parametrize("closing", ["async with", "aclose", "nothing"])
async def test_leaving_the_iterator(tiny_folder: Path, closing: str) -> None:
    """However a program stops reading: by `async with`, by hand, or by forgetting the stream."""
    async with (
        gateway_with(tiny_folder, LONG) as (gateway, target),
        Client(gateway.address) as client,
    ):
        if closing == "async with":
            async with client.stream("x") as stream:
                await first_of(stream)
        elif closing == "aclose":
            stream = client.stream("x")
            await first_of(stream)
            await stream.aclose()
            assert [piece async for piece in stream] == []
        else:
            await first_of(client.stream("x"))
        await cancelled(target)


@pytest.mark.parametrize("whole", [True, False])
async def test_cancelling_the_task(tiny_folder: Path, whole: bool) -> None:
    """The task ends as cancelled, and the request with it."""
    async with (
        gateway_with(tiny_folder, LONG) as (gateway, target),
        Client(gateway.address) as client,
    ):

        async def read() -> None:
            async for _ in client.stream("x"):
                pass

        task = asyncio.create_task(client.generate("x") if whole else read())
        await until(lambda: target.seen.tokens_sent == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cancelled(target)


async def test_a_timeout_of_the_program(tiny_folder: Path) -> None:
    """asyncio.timeout around a call is a TimeoutError, as around anything else."""
    async with (
        gateway_with(tiny_folder, LONG) as (gateway, target),
        Client(gateway.address) as client,
    ):

        async def ask() -> None:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await client.generate("x")

        limits: list[asyncio.Timeout] = []
        task = asyncio.create_task(ask())
        await until(lambda: target.seen.tokens_sent == 2)
        limits[0].reschedule(0)  # long ago
        with pytest.raises(TimeoutError):
            await task
        await cancelled(target)


async def test_the_time_of_a_call(tiny_folder: Path) -> None:
    """timeout_s ends it at both ends."""
    async with (
        gateway_with(tiny_folder, LONG) as (gateway, target),
        Client(gateway.address) as client,
    ):
        with pytest.raises(DeadlinePassed):
            await client.generate("x", timeout_s=1)
        await cancelled(target)


async def test_closing_from_another_task(tiny_folder: Path) -> None:
    """Who waits for the next piece finds the end of the stream; nobody is cancelled by it."""
    async with (
        gateway_with(tiny_folder, LONG) as (gateway, target),
        Client(gateway.address) as client,
    ):
        stream = client.stream("x")
        pieces: list[Chunk] = []

        async def read() -> None:
            async for piece in stream:
                pieces.append(piece)

        task = asyncio.create_task(read())
        await until(lambda: len(pieces) == 2)
        await stream.aclose()
        await task
        assert len(pieces) == 2
        await cancelled(target)


async def test_closing_while_it_waits_to_try_again() -> None:
    """No further call is made."""
    retries = Retries(attempts=100, first_s=0.02, longest_s=0.02)
    async with (
        played_gateway([Unavailable("away")]) as gateway,
        Client(gateway.address, retries=retries) as client,
    ):
        stream = client.stream("x")

        async def read() -> list[Chunk]:
            return [piece async for piece in stream]

        task = asyncio.create_task(read())
        await until(lambda: len(gateway.requests) >= 1)
        await stream.aclose()
        assert await task == []
        assert len(gateway.requests) < 100


async def test_closing_the_client(tiny_folder: Path) -> None:
    """Its open requests end, and say that it was this side that ended them."""
    async with gateway_with(tiny_folder, LONG) as (gateway, target):
        async with Client(gateway.address) as client:
            task = asyncio.create_task(client.generate("x"))
            await until(lambda: target.seen.tokens_sent == 2)
        with pytest.raises(CallFailed, match="this side"):
            await task
        await cancelled(target)
