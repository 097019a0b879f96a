"""The relays do to a stream what their names say."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.support.draft_relay import DraftRelay
from tests.support.draft_scripts import Drafting, Perfect
from tests.support.draft_stream import Follower, dial, make_open, open_stream
from tests.support.relay import Relay
from tests.support.scripted_drafter import ScriptedDrafter

PROMPT = [1, 2, 3]
OUTPUT = [10, 11, 12, 13, 14, 15]


@pytest.fixture
async def drafter():
    """Proposes OUTPUT for PROMPT."""
    async with ScriptedDrafter(Drafting(Perfect({tuple(PROMPT): OUTPUT}))) as running:
        yield running


async def test_a_relay_passes_on_delays_and_stalls(drafter: ScriptedDrafter) -> None:
    """Delay is added to each direction; a stall holds everything until it is lifted."""
    async with Relay(drafter.address) as relay, open_stream(relay.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=3))
        await follower.open(PROMPT, window=1)
        assert await follower.collect(1) == [10]
        relay.delay_s = 0.1
        loop = asyncio.get_running_loop()
        started = loop.time()
        await follower.confirm([10])
        assert await follower.collect(1) == [11]
        assert loop.time() - started >= 0.2
        relay.delay_s = 0
        relay.stall()
        await follower.confirm([11])
        await stream.expect_silence()
        relay.resume()
        assert await follower.collect(1) == [12]


async def test_a_relay_resets_and_refuses(drafter: ScriptedDrafter) -> None:
    """A reset ends streams with UNAVAILABLE; refused connections never get through."""
    async with Relay(drafter.address) as relay:
        async with open_stream(relay.address) as stream:
            relay.reset(refuse=True)
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
        await drafter.record.wait_for(lambda record: record.streams_open == 0)
        async with dial(relay.address) as call:
            assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.UNAVAILABLE
        relay.resume()
        async with open_stream(relay.address) as stream:
            assert stream.hello.instance_id


async def test_a_relay_drops_bytes(drafter: ScriptedDrafter) -> None:
    """What is sent vanishes without an error."""
    async with Relay(drafter.address) as relay, open_stream(relay.address) as stream:
        relay.drop()
        follower = Follower(stream, 1, make_open(prompt_len=3))
        await follower.open(PROMPT, window=1)
        await stream.expect_silence()
        assert drafter.record.updates == []


async def test_a_draft_relay_holds_proposals_for_further_updates(
    drafter: ScriptedDrafter,
) -> None:
    """With n = 2 the first proposal comes with the third update, as it was."""
    relay = DraftRelay(drafter.address, hold_updates=2)
    async with relay, open_stream(relay.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=3))
        await follower.open(PROMPT, window=2)
        await drafter.record.wait_for(lambda record: len(record.frames_sent) == 1)
        await follower.confirm([10])
        await stream.expect_silence(0.05)
        await follower.confirm([11])
        frame = await stream.receive()
        assert [list(p.tokens) for p in frame.proposals] == [[10, 11]]
        assert frame.proposals[0].seen_len == 3
    async with DraftRelay(drafter.address) as relay, open_stream(relay.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=3))
        await follower.open(PROMPT, window=2)
        assert await follower.collect(2) == [10, 11]


async def test_a_draft_relay_passes_the_end_on(drafter: ScriptedDrafter) -> None:
    """The drafter's status reaches the target, and the target's hang-up the drafter."""
    async with DraftRelay(drafter.address) as relay:
        async with open_stream(relay.address):
            pass
        await drafter.record.wait_for(lambda record: record.streams_open == 0)
        drafter.refuse = (grpc.StatusCode.FAILED_PRECONDITION, "other words")
        async with dial(relay.address) as call:
            assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.FAILED_PRECONDITION
