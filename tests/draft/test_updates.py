"""What a target tells of its sequences, and what it is told: over a real connection."""

from __future__ import annotations

import grpc
import pytest

from protos.outrider.v1 import draft_pb2
from tests.support.draft_stream import (
    Follower,
    RunningDraft,
    make_hello,
    make_open,
    open_stream,
)
from tests.support.draft_updates import LOOP, make_update

Gone = draft_pb2.SequenceGone


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("hello", draft_pb2.SpeculateRequest(hello=make_hello())),
        ("updates[0].tokens", draft_pb2.SpeculateRequest(updates=[make_update(tokens=[1000])])),
        ("updates[0].window", draft_pb2.SpeculateRequest(updates=[make_update(window=2**31)])),
        (
            "updates[0].base_len",
            draft_pb2.SpeculateRequest(updates=[make_update(base_len=3, open=make_open())]),
        ),
        (
            "updates[0].open.max_len",
            draft_pb2.SpeculateRequest(updates=[make_update(open=make_open(max_len=0))]),
        ),
        (
            "updates[0].open.sampling.top_p",
            draft_pb2.SpeculateRequest(updates=[make_update(open=make_open(top_p=7.0))]),
        ),
        (
            "updates[0].open.stop_token_ids",
            draft_pb2.SpeculateRequest(
                updates=[make_update(open=make_open(stop_token_ids=range(129)))]
            ),
        ),
        (
            "updates[1].sequence_id",
            draft_pb2.SpeculateRequest(updates=[make_update(), make_update()]),
        ),
    ],
)
async def test_a_malformed_frame_ends_its_own_stream_only(
    draft: RunningDraft, field: str, frame: draft_pb2.SpeculateRequest
) -> None:
    """The field is named; another stream goes on, and nothing of the broken one is left."""
    async with open_stream(draft.address) as other, open_stream(draft.address) as stream:
        follower = Follower(other, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=4)
        assert await follower.collect(4) == [7, 8, 9, 5]
        await stream.send(make_update(sequence_id=77))
        await stream.call.write(frame)
        code, message = await stream.status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"{field}:"), message
        await follower.confirm([7])
        assert await follower.collect(4) == [8, 9, 5, 6]
        await draft.wait_until(lambda status: status.load.sessions == 1)


async def test_opening_an_open_epoch_again_is_malformed(draft: RunningDraft) -> None:
    """`open` comes once an epoch."""
    async with open_stream(draft.address) as stream:
        await stream.send(make_update())
        await stream.send(make_update())
        assert (await stream.status())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_prefix_comes_in_pieces(draft: RunningDraft) -> None:
    """Drafting starts with the piece that has a window."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=9))
        await follower.open(LOOP[:3], window=0)
        await follower.confirm(LOOP[3:5])
        await follower.confirm(LOOP[5:], window=4)
        assert await follower.collect(4) == [7, 8, 9, 5]


async def test_windows_open_and_close(draft: RunningDraft) -> None:
    """Window 0 keeps it informed; a later window gets what follows the newest tokens."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=2)
        assert await follower.collect(2) == [7, 8]
        await follower.confirm([1, 2], window=0)
        await follower.confirm([5, 6], window=0)
        await stream.expect_silence()
        await follower.confirm([], window=6)
        assert await follower.collect(6) == [1, 2, 5, 6, 1, 2]


async def test_a_mismatch_is_redrafted_from_there(draft: RunningDraft) -> None:
    """After a rejection the next proposal starts behind the token that the target chose."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=4)
        assert await follower.collect(4) == [7, 8, 9, 5]
        await follower.confirm([7, 5])
        assert await follower.collect(4) == [6, 7, 5, 6]


async def test_an_old_epoch_is_ignored_and_a_new_one_starts_anew(draft: RunningDraft) -> None:
    """Frames of the old epoch that are still on their way change nothing."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=2)
        await follower.collect(2)
        await follower.open([*LOOP, 7, 8], window=2)
        await stream.send(make_update(epoch=1, base_len=7, tokens=[1]))
        assert await follower.collect(2) == [9, 5]
        await follower.confirm([9, 5])
        assert await follower.collect(2) == [6, 7]


async def test_unknown_sequences_and_gaps_are_gone_once(draft: RunningDraft) -> None:
    """UNKNOWN is said once an epoch; the prefix under a new epoch brings the sequence back."""
    async with open_stream(draft.address) as stream:
        await stream.send(make_update(3, epoch=4, base_len=9, tokens=[1]))
        frame = await stream.receive()
        assert [(g.sequence_id, g.epoch, g.reason) for g in frame.gone] == [
            (3, 4, Gone.REASON_UNKNOWN)
        ]
        follower = Follower(stream, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=2)
        await follower.collect(2)
        for base_len in (9, 10, 11):
            await stream.send(make_update(base_len=base_len, tokens=[1]))
            await stream.send(make_update(3, epoch=4, base_len=base_len, tokens=[1]))
        await follower.open(LOOP, window=2)
        assert await follower.collect(2) == [7, 8]
        gone = [(g.sequence_id, g.epoch, g.reason) for f in stream.frames for g in f.gone]
        assert gone == [(3, 4, Gone.REASON_UNKNOWN), (1, 1, Gone.REASON_UNKNOWN)]


async def test_finished_sequences_are_forgotten(draft: RunningDraft) -> None:
    """Their place is free at once, and nothing is said of them any more."""
    async with open_stream(draft.address) as stream:
        for sequence_id in range(1, 41):
            await stream.send(make_update(sequence_id))
            await stream.send(make_update(sequence_id, base_len=7, tokens=[], finished=True))
        await draft.wait_until(lambda status: status.load.sessions == 0)
        await stream.send(make_update(sequence_id=99))
        await stream.receive_until(lambda f: any(p.sequence_id == 99 for p in f.proposals))
        assert all(g.reason != Gone.REASON_FULL for f in stream.frames for g in f.gone)


async def test_numbers_of_a_proposal_and_of_the_load(draft: RunningDraft) -> None:
    """Times are small and present, the first frame carries the load, the totals count."""
    async with open_stream(draft.address) as stream:
        await stream.send(make_update(update_seq=7))
        frame = await stream.receive()
        proposal = frame.proposals[0]
        assert (proposal.update_seq, proposal.seen_len, proposal.start) == (7, 7, 7)
        assert 0 < proposal.held_us < 1_000_000
        assert (frame.load.sessions, frame.load.capacity) == (1, 4)
        status = await draft.status()
        assert (status.proposer, status.proposed_tokens, status.state) == ("ngram", 4, "serving")
        assert status.compute_s > 0
