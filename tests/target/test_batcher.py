"""The batcher over a model that is a function: right tokens and clean ends, whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest

from outrider.params import SpeculationMode
from outrider.serving.errors import EngineFailed, Overloaded, Unavailable
from target_service.request import Reason
from target_service.stream import TokenStream
from target_service.window import FIXED_WAIT_S
from tests.support.function_target import (
    STOP_ID,
    WAIT_S,
    Target,
    next_token,
    output_of,
    running_target,
    solo,
)
from tests.support.target_parts import make_request

MODES = [SpeculationMode.OFF, SpeculationMode.AUTO, SpeculationMode.FIXED]


@pytest.mark.parametrize("seed", range(4))
async def test_the_text_never_depends_on_company_or_drafts(seed):
    """Any mix of requests, modes and drafts, in a pool too small for all: each text as if alone."""
    rng = random.Random(seed)
    async with running_target(num_blocks=14, max_sequences=5) as target:
        target.hub.guess = lambda ids: next_token(ids) if rng.random() < 0.7 else 5
        expected = {}
        for _ in range(20):
            prompt = [rng.randrange(1, 97) for _ in range(rng.randrange(1, 25))]
            max_tokens = rng.randrange(1, 25)
            mode = rng.choice(MODES)
            request = target.submit(prompt, max_tokens, mode=mode, max_wait_s=0.002)
            expected[request] = solo(prompt, max_tokens)
            if rng.random() < 0.5:
                await asyncio.sleep(0.001)
        await target.settle()
        for request, ids in expected.items():
            output = output_of(request)
            assert output.ids == ids
            assert output.reason is (Reason.STOP if ids[-1] == STOP_ID else Reason.LENGTH)
            assert sum(token.drafted for token in output.tokens) == request.counts.accepted
        assert target.batcher.totals.generated_tokens == sum(map(len, expected.values()))
        assert target.batcher.speculation.accepted > 0


async def test_a_perfect_drafter_saves_steps():
    """With k = 4 and nothing rejected, a text takes a fifth of the steps, and each draft counts."""
    async with running_target() as target:
        prompt = next([n] for n in range(1, 97) if len(solo([n], 40)) == 40)
        request = target.submit(prompt, 40, mode=SpeculationMode.FIXED, draft_tokens=4)
        await target.settle()
        counts = request.counts
        assert output_of(request).ids == solo(prompt, 40)
        assert counts.accepted == counts.drafted == sum(counts.accepted_per_position)
        assert target.model.num_steps <= 10


async def test_late_drafts_are_waited_for_only_within_the_limit():
    """Drafts that never come cost the first rounds their wait, and then nothing more."""
    async with running_target() as target:
        target.hub.late = True
        prompt = next([n] for n in range(1, 97) if len(solo([n], 100)) == 100)
        target.submit(prompt, 100, mode=SpeculationMode.AUTO, max_wait_s=0.02)
        await target.settle()
        assert target.batcher.draft_wait_s < 0.2


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_request_frees_everything_at_once(mode):
    """In the waiting line, during its prefill, during a step, while it waits for drafts."""
    async with running_target(max_sequences=4) as target:
        for moment in range(12):
            target.hub.late = moment % 2 == 1
            for _ in range(6):
                target.submit([7] * 30, 50, mode=mode, max_wait_s=0.05)
            await asyncio.sleep(moment * 0.0007)
            for request in target.requests:
                target.batcher.cancel(request)
                target.batcher.cancel(request)
            assert target.pool.num_used == 0
            target.check_clean()
        totals = target.batcher.totals
        assert totals.started == totals.cancelled + totals.finished


async def test_cancelling_during_a_step_takes_nothing_from_the_others():
    """The step ends as if nothing had happened, and only the cancelled one gets no more."""
    async with running_target() as target:
        target.model.hold()
        gone, stays = target.submit([3, 4], 20), target.submit([5, 6], 20)
        await target.model.wait_running()
        target.batcher.cancel(gone)
        assert target.pool.num_used <= 1
        target.model.release()
        await target.settle()
        assert output_of(gone).ids == []
        assert output_of(stays).ids == solo([5, 6], 20)
        assert target.batcher.totals.failed == 0


async def test_a_step_that_fails_for_one_request_fails_only_that_one():
    """The others get their whole text, and the failed one an INTERNAL error."""
    async with running_target() as target:
        bad = make_request([9, 9], 30, stop_ids=[STOP_ID])
        target.model.fails = lambda request: request is bad and request.num_generated >= 3
        target.batcher.submit(bad)
        target.requests.append(bad)
        others = [
            target.submit([n, n + 1], 20, mode=SpeculationMode.AUTO, max_wait_s=0.001)
            for n in range(1, 5)
        ]
        await target.settle()
        assert isinstance(output_of(bad).error, EngineFailed)
        assert output_of(bad).ids == solo([9, 9], 30)[:3]
        for n, other in enumerate(others, start=1):
            assert output_of(other).ids == solo([n, n + 1], 20)
        assert target.batcher.totals.failed == 1
        assert target.num_deaths == 0


async def test_an_engine_that_always_fails_is_dead():
    """Everybody is told, health is told, and new requests are refused with the reason."""
    async with running_target(max_sequences=2) as target:
        target.model.fails = lambda request: True
        for n in range(1, 9):
            target.submit([n], 5)
        await target.settle()
        async with asyncio.timeout(WAIT_S):
            while not target.num_deaths:
                await asyncio.sleep(0.001)
        assert all(isinstance(output_of(r).error, EngineFailed) for r in target.requests)
        with pytest.raises(EngineFailed, match="poisoned"):
            target.submit([1], 5)
        assert target.num_deaths == 1


@pytest.mark.parametrize("prompt_len", [1, 100])
async def test_an_engine_that_gives_no_numbers_is_dead(prompt_len: int, log_entries: list):
    """No step fails, but none can be judged, however many pieces of prompts are between them.

    A line a request says so, without a traceback.
    """
    async with running_target(max_sequences=1) as target:
        target.model.cannot_judge = lambda request: True
        for n in range(1, 4):
            assert target.num_deaths == 0
            target.submit([n] * prompt_len, 5)
            await target.settle()
        async with asyncio.timeout(WAIT_S):
            while not target.num_deaths:
                await asyncio.sleep(0.001)
        assert all(isinstance(output_of(r).error, EngineFailed) for r in target.requests)
    lines = [entry for entry in log_entries if entry["event"] == "a request cannot go on"]
    assert [line["reason"] for line in lines] == ["the best logit is nan"] * 3
    assert not any(line["exc_info"] for line in lines)


async def test_a_failing_step_now_and_then_does_not_kill_the_engine():
    """Failures are only fatal in a row: a step that works between them starts the count anew."""
    async with running_target() as target:
        for n in range(1, 7):
            bad = n % 3 != 0
            target.model.fails = lambda request, bad=bad: bad
            request = target.submit([n], 5)
            await target.settle()
            assert (output_of(request).error is not None) == bad
        assert target.num_deaths == 0


async def test_a_full_waiting_line_refuses_with_a_time_to_come_back():
    """What is refused changes nothing, and there is room again once somebody has left."""
    async with running_target(max_sequences=1, max_waiting=2) as target:
        target.model.hold()
        kept = [target.submit([n], 5, mode=SpeculationMode.AUTO) for n in range(1, 4)]
        with pytest.raises(Overloaded) as refusal:
            target.submit([4], 5, mode=SpeculationMode.AUTO)
        assert refusal.value.retry_after_s > 0
        assert target.batcher.totals.refused == 1
        # Drafters hear of those that run; one that only waits takes no place there.
        assert len(target.hub.open_sequences) <= 1
        target.batcher.cancel(kept[0])
        target.submit([5], 5)
        target.model.release()


async def test_draining_refuses_new_requests_and_finishes_the_others():
    """SIGTERM: what runs goes on to its end."""
    async with running_target() as target:
        request = target.submit([1, 2], 10)
        target.batcher.drain()
        with pytest.raises(Unavailable):
            target.submit([1], 5)
        await target.settle()
        assert output_of(request).ids == solo([1, 2], 10)


async def test_stopping_ends_every_request():
    """Whoever is still there at the end of the grace period is told so."""
    async with running_target() as target:
        target.model.hold()
        request = target.submit([1, 2], 10)
        waiting = target.submit([1] * 100, 10)
        await target.model.wait_running()
        stop = asyncio.create_task(target.batcher.stop())
        await asyncio.sleep(0)
        target.model.release()
        await asyncio.wait_for(stop, WAIT_S)
        assert isinstance(output_of(request).error, Unavailable)
        assert isinstance(output_of(waiting).error, Unavailable)


def make_stream(target: Target, max_tokens: int) -> TokenStream:
    """A stream as the servicer makes it."""
    return TokenStream(max_tokens, on_drained=target.batcher.nudge)


async def test_a_full_stream_pauses_its_request_and_reading_resumes_it():
    """A slow reader gets the whole text, and never more than the limit and one round waits."""
    async with running_target() as target:
        stream = make_stream(target, 6)
        prompt = next([n] for n in range(1, 97) if len(solo([n], 60)) == 60)
        target.submit(prompt, 60, output=stream, mode=SpeculationMode.FIXED)
        quick = target.submit([3, 3], 40)
        ids: list[int] = []
        reason = None
        while reason is None:
            await asyncio.sleep(0.002)
            piece = await asyncio.wait_for(stream.get(), WAIT_S)
            assert len(piece.tokens) < 6 + 5
            ids += [token.id for token in piece.tokens]
            reason = piece.reason
        assert ids == solo(prompt, 60)
        await target.settle()
        assert output_of(quick).ids == solo([3, 3], 40)


async def test_an_error_comes_behind_the_tokens_before_it():
    """What was made is delivered first, then the reason for the end."""
    async with running_target() as target:
        stream = make_stream(target, 100)
        target.model.fails = lambda request: request.num_generated >= 3
        target.submit([3, 3], 40, output=stream)
        await target.settle()
        ids: list[int] = []
        with pytest.raises(EngineFailed):
            while True:
                piece = await asyncio.wait_for(stream.get(), WAIT_S)
                ids += [token.id for token in piece.tokens]
        assert ids == solo([3, 3], 40)[:3]


async def test_a_fixed_request_that_waits_holds_up_nobody_else():
    """It sits out steps while others go on; alone it waits as it asked."""
    async with running_target(max_sequences=3) as target:
        target.hub.late = True
        fixed = target.submit([5, 5], 30, mode=SpeculationMode.FIXED, draft_tokens=2)
        await asyncio.sleep(0.02)
        quick = [target.submit([3, n], 40) for n in (3, 4, 5)]  # one of them has to queue
        async with asyncio.timeout(FIXED_WAIT_S):
            while not all(request.ended for request in quick):
                await asyncio.sleep(0.001)
        for request, n in zip(quick, (3, 4, 5), strict=True):
            assert output_of(request).ids == solo([3, n], 40)
        assert fixed.num_generated == 1
        target.hub.late = False
        target.hub.update(fixed.drafts, 5)
        await target.settle()
        assert output_of(fixed).ids == solo([5, 5], 30)


async def test_what_cannot_be_judged_ends_alone():
    """Logits that no token can be chosen from concern one request, not the engine."""
    async with running_target() as target:
        others = [target.submit([3, n], 20) for n in (3, 4)]
        bad = target.submit([7, 7], 20)
        target.model.cannot_judge = lambda request: request is bad and request.num_generated >= 3
        await target.settle()
        assert isinstance(output_of(bad).error, EngineFailed)
        assert output_of(bad).ids == solo([7, 7], 20)[:3]
        for request, n in zip(others, (3, 4), strict=True):
            assert output_of(request).ids == solo([3, n], 20)
        assert target.batcher.totals.failed == 1
        assert target.model.num_steps <= 22  # nobody's step was run again


async def test_an_idle_target_does_nothing():
    """Without work there are no steps, and paused requests do not make the loop spin."""
    async with running_target() as target:
        request = target.submit([3, 3], 10)
        output_of(request).full = True
        steps = []
        plan = target.scheduler.plan
        target.scheduler.plan = lambda *args: steps.append(1) or plan(*args)
        await asyncio.sleep(0.05)
        assert len(steps) <= 2
        assert target.model.num_steps <= 1
        output_of(request).full = False
        target.batcher.nudge()
        await target.settle()
        assert output_of(request).ids == solo([3, 3], 10)
