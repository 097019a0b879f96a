"""`Draft.Speculate` over a real connection: what the draft service promises to targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from draft_service.batch import DraftLoop
from draft_service.book import Capacity
from draft_service.proposers.ngram import NgramProposer
from draft_service.record import SequenceRecords
from draft_service.servicer import DraftServicer
from draft_service.sessions import Session
from outrider.serving.interceptors import ErrorInterceptor
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.draft_stream import (
    DraftStream,
    Follower,
    RunningDraft,
    dial,
    make_hello,
    make_open,
    open_stream,
    run_draft_service,
)

LOOP = [5, 6, 7, 8, 9, 5, 6]
Gone = draft_pb2.SequenceGone


@pytest.fixture
async def draft():
    """An n-gram drafter with room for four sequences."""
    settings = DraftSettings(port=0, max_sequences=4, max_window=16)
    async with run_draft_service(settings) as running:
        yield running


def update(sequence_id: int = 1, **fields: object) -> draft_pb2.SequenceUpdate:
    """An update that opens a sequence, but for `fields`."""
    default = {"epoch": 1, "update_seq": 1, "base_len": 0, "tokens": LOOP, "window": 4}
    if "base_len" not in fields and "open" not in fields:
        fields["open"] = make_open(prompt_len=len(LOOP))
    return draft_pb2.SequenceUpdate(sequence_id=sequence_id, **(default | fields))


async def status_of_hello(address: str, frame: draft_pb2.SpeculateRequest) -> tuple:
    """How a stream ends that begins with `frame`."""
    async with dial(address) as call:
        await call.write(frame)
        return await DraftStream(call).status()


async def test_the_hello_says_what_it_is_and_accepts(draft: RunningDraft) -> None:
    """Limits are the settings', the hash is empty, the name is that of GetStatus."""
    async with open_stream(draft.address) as stream:
        hello = stream.hello
    assert (hello.protocol_version.major, hello.protocol_version.minor) == (1, 0)
    assert hello.token_table_hash == b""
    assert (hello.limits.max_sequences, hello.limits.max_window) == (4, 16)
    assert hello.limits.max_frame_bytes == 64 * 1024
    assert hello.instance_id == (await draft.status()).instance_id


async def test_one_minor_version_of_skew_works(draft: RunningDraft) -> None:
    """Two do not, nor does another major version; the message names both."""
    ok = draft_pb2.ProtocolVersion(major=1, minor=1)
    async with open_stream(draft.address, make_hello(protocol_version=ok)) as stream:
        assert stream.hello.instance_id
    for major, minor in ((1, 2), (2, 0)):
        hello = make_hello(protocol_version=draft_pb2.ProtocolVersion(major=major, minor=minor))
        code, message = await status_of_hello(
            draft.address, draft_pb2.SpeculateRequest(hello=hello)
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"{major}.{minor}" in message and "1.0" in message


async def test_the_first_frame_must_be_a_hello_alone(draft: RunningDraft) -> None:
    """Updates before or beside it are refused with the field's name."""
    frames = {
        "hello": draft_pb2.SpeculateRequest(updates=[update()]),
        "updates": draft_pb2.SpeculateRequest(hello=make_hello(), updates=[update()]),
    }
    for field, frame in frames.items():
        code, message = await status_of_hello(draft.address, frame)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"{field}:")


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("hello", draft_pb2.SpeculateRequest(hello=make_hello())),
        ("updates[0].tokens", draft_pb2.SpeculateRequest(updates=[update(tokens=[1000])])),
        ("updates[0].window", draft_pb2.SpeculateRequest(updates=[update(window=2**31)])),
        (
            "updates[0].base_len",
            draft_pb2.SpeculateRequest(updates=[update(base_len=3, open=make_open())]),
        ),
        (
            "updates[0].open.max_len",
            draft_pb2.SpeculateRequest(updates=[update(open=make_open(max_len=0))]),
        ),
        (
            "updates[0].open.sampling.top_p",
            draft_pb2.SpeculateRequest(updates=[update(open=make_open(top_p=7.0))]),
        ),
        ("updates[1].sequence_id", draft_pb2.SpeculateRequest(updates=[update(), update()])),
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
        await stream.send(update(sequence_id=77))
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
        await stream.send(update())
        await stream.send(update())
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
        await stream.send(update(epoch=1, base_len=7, tokens=[1]))
        assert await follower.collect(2) == [9, 5]
        await follower.confirm([9, 5])
        assert await follower.collect(2) == [6, 7]


async def test_unknown_sequences_and_gaps_are_gone_once(draft: RunningDraft) -> None:
    """UNKNOWN is said once an epoch; the prefix under a new epoch brings the sequence back."""
    async with open_stream(draft.address) as stream:
        await stream.send(update(3, epoch=4, base_len=9, tokens=[1]))
        frame = await stream.receive()
        assert [(g.sequence_id, g.epoch, g.reason) for g in frame.gone] == [
            (3, 4, Gone.REASON_UNKNOWN)
        ]
        follower = Follower(stream, 1, make_open(prompt_len=7))
        await follower.open(LOOP, window=2)
        await follower.collect(2)
        for base_len in (9, 10, 11):
            await stream.send(update(base_len=base_len, tokens=[1]))
            await stream.send(update(3, epoch=4, base_len=base_len, tokens=[1]))
        await follower.open(LOOP, window=2)
        assert await follower.collect(2) == [7, 8]
        gone = [(g.sequence_id, g.epoch, g.reason) for f in stream.frames for g in f.gone]
        assert gone == [(3, 4, Gone.REASON_UNKNOWN), (1, 1, Gone.REASON_UNKNOWN)]


async def test_full_and_too_long(draft: RunningDraft) -> None:
    """A fifth sequence finds no room until another ends; a prefix beyond the limit is refused."""
    async with open_stream(draft.address) as stream:
        for sequence_id in range(1, 6):
            await stream.send(update(sequence_id))
        frame = await stream.receive_until(lambda frame: len(frame.gone) > 0)
        assert [(g.sequence_id, g.reason) for g in frame.gone] == [(5, Gone.REASON_FULL)]
        await stream.send(update(4, finished=True))
        await stream.send(update(6))
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
        await stream.send(update(update_seq=99, base_len=16 * len(piece), tokens=[5] * 200))
        frame = await stream.receive()
        assert [g.reason for g in frame.gone] == [Gone.REASON_TOO_LONG]
        await other.wait_until(lambda status: status.load.sessions == 0)


async def test_finished_sequences_are_forgotten(draft: RunningDraft) -> None:
    """Their place is free at once, and nothing is said of them any more."""
    async with open_stream(draft.address) as stream:
        for sequence_id in range(1, 41):
            await stream.send(update(sequence_id))
            await stream.send(update(sequence_id, base_len=7, tokens=[], finished=True))
        await draft.wait_until(lambda status: status.load.sessions == 0)
        await stream.send(update(sequence_id=99))
        await stream.receive_until(lambda f: any(p.sequence_id == 99 for p in f.proposals))
        assert all(g.reason != Gone.REASON_FULL for f in stream.frames for g in f.gone)


async def test_two_targets_at_once_do_not_see_each_other(draft: RunningDraft) -> None:
    """The same sequence id on two streams is two sequences; one stream's end leaves the other."""
    async with open_stream(draft.address) as one:
        async with open_stream(draft.address) as two:
            first = Follower(one, 1, make_open(prompt_len=7))
            second = Follower(two, 1, make_open(prompt_len=4))
            await first.open(LOOP, window=3)
            await second.open([1, 2, 1, 2], window=3)
            assert await first.collect(3) == [7, 8, 9]
            assert await second.collect(3) == [1, 2, 1]
            assert (await draft.status()).streams == 2
        status = await draft.wait_until(lambda status: status.streams == 1)
        assert status.load.sessions == 1
        await first.confirm([7])
        assert await first.collect(3) == [8, 9, 5]


async def test_a_dead_stream_frees_its_sequences(draft: RunningDraft) -> None:
    """Whether the target hangs up or half-closes."""
    for ending in ("cancel", "done_writing"):
        async with open_stream(draft.address) as stream:
            await stream.send(*[update(sequence_id) for sequence_id in range(1, 5)])
            await draft.wait_until(lambda status: status.load.sessions == 4)
            if ending == "cancel":
                stream.call.cancel()
            else:
                await stream.call.done_writing()
                assert (await stream.status())[0] is grpc.StatusCode.OK
            await draft.wait_until(lambda s: s.load.sessions == 0 and s.streams == 0)


async def test_a_target_that_does_not_read_costs_nothing(draft: RunningDraft) -> None:
    """Thousands of unread answers are not queued: once the connection is full, what is behind it is
    composed later, from the newest state."""
    num_rounds, num_proposals, newest = 1500, 0, 0
    async with open_stream(draft.address) as stream:
        for epoch in range(1, num_rounds + 1):
            await stream.send(*[update(sequence, epoch=epoch, window=16) for sequence in (1, 2, 3)])
        async with asyncio.timeout(15):
            while newest < num_rounds:
                proposals = (await stream.receive()).proposals
                num_proposals += len(proposals)
                newest = max(each.epoch for each in proposals)
        assert num_proposals < 2 * num_rounds  # of three times as many updates
        assert (await draft.status()).load.sessions == 3


async def test_numbers_of_a_proposal_and_of_the_load(draft: RunningDraft) -> None:
    """Times are small and present, the first frame carries the load, the totals count."""
    async with open_stream(draft.address) as stream:
        await stream.send(update(update_seq=7))
        frame = await stream.receive()
        proposal = frame.proposals[0]
        assert (proposal.update_seq, proposal.seen_len, proposal.start) == (7, 7, 7)
        assert 0 < proposal.held_us < 1_000_000
        assert (frame.load.sessions, frame.load.capacity) == (1, 4)
        status = await draft.status()
        assert (status.proposer, status.proposed_tokens, status.state) == ("ngram", 4, "serving")
        assert status.compute_s > 0


async def test_drain_ends_streams_at_once(draft: RunningDraft) -> None:
    """Open streams and new ones get UNAVAILABLE."""
    async with open_stream(draft.address) as stream:
        await stream.send(update())
        await stream.receive()
        await draft.service.drain()
        assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
        async with dial(draft.address) as call:
            assert (await DraftStream(call).status())[0] is grpc.StatusCode.UNAVAILABLE
        assert (await draft.status()).state == "draining"
        assert (await draft.status()).load.sessions == 0


class Failing(NgramProposer):
    """A proposer whose step fails."""

    async def propose(self, sessions: Sequence[Session]) -> list[Session]:
        raise RuntimeError("no luck")


class FailingForOne(NgramProposer):
    """A proposer whose step fails whenever one sequence is in it."""

    async def propose(self, sessions: Sequence[Session]) -> list[Session]:
        if any(each.sequence_id == 2 for each in sessions):
            raise RuntimeError("no luck")
        return await super().propose(sessions)


async def test_a_step_that_fails_for_one_sequence_costs_only_that_one() -> None:
    """It is gone, as one for which there is no place; the others of the stream go on."""
    async with run_draft_service(DraftSettings(port=0), FailingForOne(1, 4)) as draft:
        async with open_stream(draft.address) as stream:
            await stream.send(update(1), update(2), update(3))
            got = set[int]()
            gone = list[tuple[int, int]]()
            while len(got) < 2 or not gone:
                frame = await stream.receive()
                got |= {each.sequence_id for each in frame.proposals}
                gone += [(each.sequence_id, each.reason) for each in frame.gone]
            assert (got, gone) == ({1, 3}, [(2, Gone.REASON_FULL)])
        status = await draft.status()
        assert status.state == "serving" and await draft.is_serving()


async def test_steps_that_fail_for_everybody_end_every_stream_and_turn_health_bad() -> None:
    """Targets see INTERNAL and go on alone; the process says that it cannot draft."""
    async with run_draft_service(DraftSettings(port=0), Failing(1, 4)) as draft:
        assert await draft.is_serving()
        async with open_stream(draft.address) as stream:
            for number in (1, 2):
                await stream.send(update(number))
                assert [each.sequence_id for each in (await stream.receive()).gone] == [number]
            await stream.send(update(3))
            code, message = await stream.status()
            assert code is grpc.StatusCode.INTERNAL
            assert "no luck" in message
        async with dial(draft.address) as call:
            assert (await DraftStream(call).status())[0] is grpc.StatusCode.INTERNAL
        assert not await draft.is_serving()
        assert (await draft.status()).state == "dead"


async def test_a_stream_without_a_hello_is_ended() -> None:
    """Silent connections do not use up the streams of a drafter."""
    proposer = NgramProposer(1, 4)
    servicer = DraftServicer(
        proposer, DraftLoop(proposer), Capacity(4, 100, 1000), SequenceRecords(),
        max_window=4, instance_id="x", hello_timeout_s=0.05,
    )  # fmt: skip
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with dial(f"127.0.0.1:{port}") as call:
            code, message = await DraftStream(call).status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert message.startswith("hello:")
    finally:
        await server.stop(0)


async def test_frames_stay_within_the_targets_limit() -> None:
    """Many long proposals are spread over frames of the size that the target accepts."""
    settings = DraftSettings(port=0, max_window=256, max_sequences=200)
    hello = make_hello(limits=draft_pb2.Limits(max_frame_bytes=8192))
    async with run_draft_service(settings) as draft, open_stream(draft.address, hello) as stream:
        await stream.send(*[update(i, window=256) for i in range(1, 151)])
        got: dict[int, int] = dict.fromkeys(range(1, 151), 0)
        while sum(got.values()) < 150 * 256:
            frame = await stream.receive()
            assert frame.ByteSize() <= 8192
            for proposal in frame.proposals:
                got[proposal.sequence_id] += len(proposal.tokens)
        assert set(got.values()) == {256}
