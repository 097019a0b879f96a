"""Streams side by side, and how they end: what happens to one is not felt by the others."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from draft_service.proposers.ngram import NgramProposer
from draft_service.sessions import Session
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2
from tests.support.draft_stream import (
    DraftStream,
    Follower,
    RunningDraft,
    dial,
    make_open,
    open_stream,
    run_draft_service,
)
from tests.support.draft_updates import LOOP, make_update

Gone = draft_pb2.SequenceGone


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
            await stream.send(*[make_update(sequence_id) for sequence_id in range(1, 5)])
            await draft.wait_until(lambda status: status.load.sessions == 4)
            if ending == "cancel":
                stream.call.cancel()
            else:
                await stream.call.done_writing()
                assert (await stream.status())[0] is grpc.StatusCode.OK
            await draft.wait_until(lambda s: s.load.sessions == 0 and s.streams == 0)


async def test_drain_ends_streams_at_once(draft: RunningDraft) -> None:
    """Open streams and new ones get UNAVAILABLE."""
    async with open_stream(draft.address) as stream:
        await stream.send(make_update())
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
            await stream.send(make_update(1), make_update(2), make_update(3))
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
                await stream.send(make_update(number))
                assert [each.sequence_id for each in (await stream.receive()).gone] == [number]
            await stream.send(make_update(3))
            code, message = await stream.status()
            assert code is grpc.StatusCode.INTERNAL
            assert "no luck" in message
        async with dial(draft.address) as call:
            assert (await DraftStream(call).status())[0] is grpc.StatusCode.INTERNAL
        assert not await draft.is_serving()
        assert (await draft.status()).state == "dead"
