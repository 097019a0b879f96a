"""What a drafter takes, holds and sends is bounded."""

from __future__ import annotations

import asyncio

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2
from tests.support.draft_stream import (
    Follower,
    RunningDraft,
    make_hello,
    make_open,
    open_stream,
    run_draft_service,
)
from tests.support.draft_updates import LOOP, make_update

Gone = draft_pb2.SequenceGone


async def test_the_window_is_capped_by_both_sides(draft: RunningDraft) -> None:
    """Neither the drafter's nor the target's own limit is exceeded."""
    for limit, expected in ((0, 16), (3, 3)):
        hello = make_hello(limits=draft_pb2.Limits(max_window=limit))
        async with open_stream(draft.address, hello) as stream:
            follower = Follower(stream, 1, make_open(prompt_len=7))
            await follower.open(LOOP, window=200)
            await follower.collect(expected)
            await stream.expect_silence(0.05)
            assert len(follower.tail) == expected


async def test_full_and_too_long(draft: RunningDraft) -> None:
    """A fifth sequence finds no room until another ends; a prefix beyond the limit is refused."""
    async with open_stream(draft.address) as stream:
        for sequence_id in range(1, 6):
            await stream.send(make_update(sequence_id))
        frame = await stream.receive_until(lambda frame: len(frame.gone) > 0)
        assert [(g.sequence_id, g.reason) for g in frame.gone] == [(5, Gone.REASON_FULL)]
        await stream.send(make_update(4, finished=True))
        await stream.send(make_update(6))
        await stream.receive_until(lambda f: any(p.sequence_id == 6 for p in f.proposals))


async def test_lengths_are_bounded_by_the_target_and_by_the_drafter(draft: RunningDraft) -> None:
    """Nothing is drafted behind max_len; a prefix longer than the drafter holds is TOO_LONG."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=7, max_len=10))
        await follower.open(LOOP, window=8)
        assert await follower.collect(8) == [7, 8, 9]
        assert follower.dry
    settings = DraftSettings(port=0)
    async with run_draft_service(settings) as other, open_stream(other.address) as stream:
        piece = LOOP * 1170
        follower = Follower(stream, 1, make_open(prompt_len=7, max_len=2**20))
        await follower.open(piece, window=0)
        for _ in range(15):
            await follower.confirm(piece)
        assert stream.hello.limits.max_len == 131_072
        await stream.send(make_update(update_seq=99, base_len=16 * len(piece), tokens=[5] * 200))
        frame = await stream.receive()
        assert [g.reason for g in frame.gone] == [Gone.REASON_TOO_LONG]
        await other.wait_until(lambda status: status.load.sessions == 0)


async def test_a_target_that_does_not_read_costs_nothing(draft: RunningDraft) -> None:
    """Thousands of unread answers are not queued: once the connection is full, what is behind it is
    composed later, from the newest state."""
    num_rounds, num_proposals, newest = 1500, 0, 0
    async with open_stream(draft.address) as stream:
        for epoch in range(1, num_rounds + 1):
            await stream.send(
                *[make_update(sequence, epoch=epoch, window=16) for sequence in (1, 2, 3)]
            )
        async with asyncio.timeout(15):
            while newest < num_rounds:
                proposals = (await stream.receive()).proposals
                num_proposals += len(proposals)
                newest = max(each.epoch for each in proposals)
        assert num_proposals < 2 * num_rounds  # of three times as many updates
        assert (await draft.status()).load.sessions == 3


async def test_frames_stay_within_the_targets_limit() -> None:
    """Many long proposals are spread over frames of the size that the target accepts."""
    settings = DraftSettings(port=0, max_window=256, max_sequences=200)
    hello = make_hello(limits=draft_pb2.Limits(max_frame_bytes=8192))
    async with run_draft_service(settings) as draft, open_stream(draft.address, hello) as stream:
        await stream.send(*[make_update(i, window=256) for i in range(1, 151)])
        got: dict[int, int] = dict.fromkeys(range(1, 151), 0)
        while sum(got.values()) < 150 * 256:
            frame = await stream.receive()
            assert frame.ByteSize() <= 8192
            for proposal in frame.proposals:
                got[proposal.sequence_id] += len(proposal.tokens)
        assert set(got.values()) == {256}
