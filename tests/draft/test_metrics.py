"""What a drafter shows adds up in every scrape, and equals what it says by gRPC."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from outrider.serving.settings import DraftSettings
from tests.support.draft_stream import (
    Follower,
    RunningDraft,
    make_open,
    open_stream,
    run_draft_service,
)
from tests.support.draft_updates import LOOP, make_update
from tests.support.scrapes import Scrape, scrape_registry
from tests.support.sums import assert_draft_adds_up


def read(draft: RunningDraft) -> Scrape:
    """What a scrape shows now."""
    return scrape_registry(draft.service.registry)


def ended(draft: RunningDraft) -> dict[str, float]:
    """Sequences by how they ended, where there are any."""
    found = read(draft).by("drafter_sequences_total", "outcome")
    assert set(found) == {
        "finished", "evicted", "unknown", "full", "too_long", "failed", "lost",
    }  # fmt: skip
    return {outcome: count for outcome, count in found.items() if count}


async def test_every_sequence_is_in_one_place(draft: RunningDraft) -> None:
    """Whatever targets do: started is what ended and what is open, and nothing falls."""

    async def watch() -> None:
        before = None
        while True:
            now = read(draft)
            now.check_numbers(before)
            assert_draft_adds_up(now)
            before = now
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    async with open_stream(draft.address) as stream:
        for sequence_id in range(1, 6):
            await stream.send(make_update(sequence_id))
        await draft.wait_until(lambda status: status.load.sessions == 4)
        await stream.send(make_update(1, finished=True))
        await stream.send(make_update(2, base_len=3, tokens=[1]))
        await draft.wait_until(lambda status: status.load.sessions == 2)
        assert read(draft)("draft_sessions") == 2
        assert read(draft)("draft_streams") == 1
        await stream.send(make_update(3, window=2**31))
        assert (await stream.status())[0] is grpc.StatusCode.INVALID_ARGUMENT
    await draft.wait_until(lambda status: status.streams == 0)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert ended(draft) == {"full": 1, "finished": 1, "unknown": 1, "lost": 2}
    assert read(draft)("drafter_sequences_started_total") == 5
    assert read(draft)("draft_sessions") == read(draft)("draft_streams") == 0
    assert read(draft)("draft_session_capacity") == 4


async def test_figures_equal_those_of_get_status(draft: RunningDraft) -> None:
    """Tokens, time and load, and as many observations as steps."""
    async with open_stream(draft.address) as stream:
        follower = Follower(stream, 1, make_open(prompt_len=len(LOOP)))
        await follower.open(LOOP, window=4)
        await follower.collect(4)
        for token in (7, 8, 9):
            await follower.confirm([token])
            await follower.collect(4)
        status, now = await draft.status(), read(draft)
    assert now("drafter_proposed_tokens_total") == status.proposed_tokens == 7
    assert now("busy_seconds_total") == status.compute_s == now("drafter_step_seconds_sum")
    assert now("drafter_step_seconds_count") == now("drafter_batch_sequences_count") == 4
    assert now("drafter_batch_sequences_sum") == 4
    assert now("draft_queue") == now("telemetry_errors_total") == 0


async def test_before_the_first_target_there_are_zeros() -> None:
    """A scrape of an idle drafter shows every series, so that rates see the first sequence."""
    async with run_draft_service(DraftSettings(port=0)) as draft:
        read(draft).check_numbers()
        assert_draft_adds_up(read(draft))
        assert ended(draft) == {}
