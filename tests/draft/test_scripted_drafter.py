"""The scripted drafter keeps the protocol where its script does not say otherwise."""

from __future__ import annotations

import asyncio

import grpc

from protos.outrider.v1 import draft_pb2
from tests.support.draft_scripts import (
    JUNK,
    Always,
    Closing,
    Crossing,
    Drafting,
    Empty,
    Going,
    Junk,
    Late,
    Mute,
    Partial,
    Perfect,
    Wrong,
)
from tests.support.draft_stream import (
    DraftStream,
    Follower,
    dial,
    make_hello,
    make_open,
    open_stream,
)
from tests.support.scripted_drafter import ScriptedDrafter, spawn_scripted_drafter

PROMPT = [1, 2, 3]
OUTPUT = [10, 11, 12, 13, 14, 15, 16, 17]
KNOWN = {tuple(PROMPT): OUTPUT}
OPEN = make_open(prompt_len=3)


async def test_perfect_sends_each_token_of_the_known_output_once() -> None:
    """The tail follows what is confirmed, and ends where the output ends."""
    async with ScriptedDrafter(Drafting(Perfect(KNOWN))) as drafter:
        async with open_stream(drafter.address) as stream:
            follower = Follower(stream, 1, OPEN)
            await follower.open(PROMPT, window=4)
            assert await follower.collect(4) == OUTPUT[:4]
            await follower.confirm(OUTPUT[:2])
            assert await follower.collect(4) == OUTPUT[2:6]
            await follower.confirm(OUTPUT[2:6], window=8)
            assert await follower.collect(8) == OUTPUT[6:]
            assert follower.dry
            await follower.finish()
            await drafter.record.wait_for(lambda record: bool(record.finished))
        assert drafter.record.windows(1) == [4, 4, 8, 8]
        assert drafter.record.finished == {(0, 1)}
        assert drafter.record.tokens_sent == len(OUTPUT)
        assert drafter.record.problems == []


async def test_wrong_and_partial_differ_where_they_should() -> None:
    """Partial is right for n tokens behind each new start; wrong is never right."""
    async with (
        ScriptedDrafter(Drafting(Partial(KNOWN, right=2, vocab_size=100))) as drafter,
        open_stream(drafter.address) as stream,
    ):
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=4)
        assert await follower.collect(4) == [10, 11, 13, 14]
        await follower.confirm([10, 11, 12])
        assert await follower.collect(4) == [13, 14, 16, 17]
        drafter.behaviour = Drafting(Wrong(KNOWN, vocab_size=100))
        await follower.open(PROMPT, window=2)
        assert await follower.collect(2) == [11, 12]
        drafter.behaviour = Drafting(Always(0), lengths=[1])
        await follower.open(PROMPT, window=2)
        assert await follower.collect(2) == [0]
        assert follower.dry


async def test_empty_and_mute() -> None:
    """Empty says so at once, mute says nothing; neither answers window 0."""
    async with ScriptedDrafter(Empty()) as drafter, open_stream(drafter.address) as stream:
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=0)
        await follower.confirm([10], window=3)
        assert await follower.collect(1) == []
        assert follower.dry
        assert len(drafter.record.frames_sent) == 1
        drafter.behaviour = Mute()
        await follower.confirm([11])
        await stream.expect_silence()


async def test_late_delays_every_nth_answer() -> None:
    """Each second answer takes the delay, the others none."""
    late = Late(Drafting(Perfect(KNOWN)), 0.2, every=2)
    async with ScriptedDrafter(late) as drafter, open_stream(drafter.address) as stream:
        follower = Follower(stream, 1, OPEN)
        loop = asyncio.get_running_loop()
        took = []
        await follower.open(PROMPT, window=1)
        for token in OUTPUT[:4]:
            started = loop.time()
            assert await follower.collect(1) == [token]
            took.append(loop.time() - started)
            await follower.confirm([token])
        assert [each > 0.15 for each in took] == [False, True, False, True]


async def test_crossing_holds_until_further_updates_came() -> None:
    """A proposal held for two updates still carries what the drafter had seen."""
    crossing = Crossing(Drafting(Perfect(KNOWN)), updates=2)
    async with ScriptedDrafter(crossing) as drafter, open_stream(drafter.address) as stream:
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=4)
        await follower.confirm(OUTPUT[:1])
        await drafter.record.wait_for(lambda record: len(record.updates) == 2)
        assert drafter.record.frames_sent == []
        await follower.confirm(OUTPUT[1:2])
        frame = await stream.receive()
        assert frame.proposals[0].seen_len == len(PROMPT)
        assert list(frame.proposals[0].tokens) == OUTPUT[:4]


async def test_junk_of_every_kind_can_be_sent() -> None:
    """Each kind goes out as it is, one an update."""
    async with ScriptedDrafter(Junk()) as drafter, open_stream(drafter.address) as stream:
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=4)
        for _ in range(len(JUNK) - 1):
            await follower.confirm([9])
        frames = [await stream.receive() for _ in JUNK]
    assert frames[list(JUNK).index("largest_uint32_id")].proposals[0].tokens == [2**32 - 1]
    assert frames[list(JUNK).index("oversized")].ByteSize() > 64 * 1024


async def test_streams_can_be_refused_closed_and_left_alone() -> None:
    """The script decides how a stream begins and ends."""
    refuse = (grpc.StatusCode.FAILED_PRECONDITION, "other words")
    async with ScriptedDrafter(Empty(), refuse=refuse) as drafter, dial(drafter.address) as call:
        assert await DraftStream(call).status() == refuse
    closing = Closing(Empty(), rounds=2, code=grpc.StatusCode.ABORTED)
    async with ScriptedDrafter(closing) as drafter, open_stream(drafter.address) as stream:
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=1)
        await follower.confirm([10])
        assert (await stream.status())[0] is grpc.StatusCode.ABORTED
        await drafter.record.wait_for(lambda record: record.streams_open == 0)


async def test_gone_and_other_hellos() -> None:
    """SequenceGone comes at the named round; Hello fields can be anything."""
    hello = draft_pb2.Hello(token_table_hash=b"x", vocab_size=7)
    going = Going(Empty(), rounds=2, reason=draft_pb2.SequenceGone.REASON_FULL)
    async with (
        ScriptedDrafter(going, hello=hello) as drafter,
        open_stream(drafter.address, make_hello(vocab_size=9)) as stream,
    ):
        assert (stream.hello.token_table_hash, stream.hello.vocab_size) == (b"x", 7)
        follower = Follower(stream, 1, OPEN)
        await follower.open(PROMPT, window=1)
        await follower.confirm([10])
        frame = await stream.receive_until(lambda frame: len(frame.gone) > 0)
        assert frame.gone[0].reason == draft_pb2.SequenceGone.REASON_FULL


async def test_a_targets_mistakes_are_recorded() -> None:
    """A gap and an update without an open are named."""
    async with ScriptedDrafter(Empty()) as drafter, open_stream(drafter.address) as stream:
        await stream.send(draft_pb2.SequenceUpdate(sequence_id=1, epoch=1, update_seq=1))
        await stream.send(draft_pb2.SequenceUpdate(sequence_id=1, epoch=1, base_len=5))
        await drafter.record.wait_for(lambda record: len(record.problems) == 2)


async def test_a_spawned_drafter_drafts_and_can_be_killed() -> None:
    """The process answers as the one in this loop does, and dies without a goodbye."""
    drafter = await spawn_scripted_drafter({"script": "perfect", "known": [[PROMPT, OUTPUT]]})
    try:
        async with open_stream(drafter.address) as stream:
            follower = Follower(stream, 1, OPEN)
            await follower.open(PROMPT, window=4)
            assert await follower.collect(4) == OUTPUT[:4]
            await drafter.kill()
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
    finally:
        await drafter.kill()
