"""The batcher over a model that is a function: right tokens and clean ends, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from outrider.engine.block_pool import BlockPool
from outrider.params import SpeculationMode
from outrider.serving.device import DeviceThread
from outrider.serving.errors import EngineFailed, Overloaded, Unavailable
from target_service.batcher import Batcher
from target_service.draft_hub import DraftedSequence
from target_service.draft_tail import DraftTotals, ProposedTokens
from target_service.request import Reason, Request
from target_service.scheduler import Plan, Scheduler
from target_service.stream import TokenStream
from target_service.verifier import Verdict
from target_service.window import StepCost
from tests.support.target_parts import CollectedOutput, make_request

STOP_ID = 0
WAIT_S = 5.0


def next_token(prefix: Sequence[int]) -> int:
    """What this model says behind a prefix: a repeatable mess with a stop now and then."""
    mixed = len(prefix)
    for token in prefix[-8:]:
        mixed = (mixed * 31 + token) % 1_000_003
    return mixed % 97


def solo(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The text that a request has to give, alone or in company."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids))
        if ids[-1] == STOP_ID:
            break
    return ids[len(prompt) :]


class FunctionModel:
    """Stands for the device: a step is `next_token` applied to what the plan forwards.

    `fails(request)` poisons steps; with `gated`, each step waits until `release` is called.
    """

    def __init__(self) -> None:
        self.fails: Callable[[Request], bool] = lambda request: False
        self.num_steps = 0
        self.running = threading.Event()
        self._gate = threading.Event()
        self._gate.set()

    def hold(self) -> None:
        """Let the next step wait."""
        self.running.clear()
        self._gate.clear()

    def release(self) -> None:
        """Let it go on."""
        self._gate.set()

    async def wait_running(self) -> None:
        """Until a step is on the device."""
        assert await asyncio.to_thread(self.running.wait, WAIT_S)

    def run(self, plan: Plan) -> list[Verdict | None]:
        """One step."""
        self.num_steps += 1
        self.running.set()
        assert self._gate.wait(WAIT_S)
        verdicts: list[Verdict | None] = []
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            if self.fails(share.request):
                raise ArithmeticError("poisoned")
            verdicts.append(None if item.num_logits == 0 else self._verify(share, item))
        return verdicts

    def _verify(self, share, item) -> Verdict:
        line = [*share.request.sequence.token_ids, *share.drafts]
        assert item.token_ids == line[item.start :]
        prefix = line[: len(line) - len(share.drafts)]
        tokens: list[int] = []
        for draft in [*share.drafts, None]:
            tokens.append(next_token([*prefix, *tokens]))
            if tokens[-1] != draft:
                break
        return Verdict(tokens, len(tokens) - 1)


class FakeHub:
    """Drafters without a wire: `guess(prefix)` at once, or never when `late`."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self.guess: Callable[[Sequence[int]], int] = next_token
        self.late = False
        self.open_sequences: dict[DraftedSequence, int] = {}
        self._arrived = arrived

    def open(self, sequence: DraftedSequence) -> None:
        """A sequence that wants drafts."""
        self.open_sequences[sequence] = 0

    def update(self, sequence: DraftedSequence, window: int) -> None:
        """Fill the window."""
        self.open_sequences[sequence] = window
        ids = list(sequence.confirmed)
        while not self.late and len(ids) < len(sequence.confirmed) + window:
            ids.append(self.guess(ids))
        seen = len(sequence.confirmed)
        if len(ids) > seen:
            tail = sequence.tail
            tail.add(ProposedTokens(tail.epoch, seen, seen, ids[seen:]))
            self._arrived.set()

    def close(self, sequence: DraftedSequence) -> None:
        """The sequence has ended."""
        self.open_sequences.pop(sequence)

    def granted(self, sequence: DraftedSequence) -> int:
        """Drafts to hope for."""
        return self.open_sequences[sequence]


class Target:
    """A batcher with everything around it."""

    def __init__(self, *, num_blocks: int, max_sequences: int, max_waiting: int) -> None:
        self.model = FunctionModel()
        self.cost, self.drafts = StepCost(), DraftTotals()
        self.wake, arrived = asyncio.Event(), asyncio.Event()
        self.hub = FakeHub(arrived)
        self.num_deaths = 0
        self.pool = BlockPool(num_blocks, 4)
        self.scheduler = Scheduler(
            self.pool, max_sequences=max_sequences, step_tokens=16, max_waiting=max_waiting
        )
        self.device = DeviceThread("test-device")
        self.batcher = Batcher(
            self.scheduler,
            self.hub,
            self.model.run,
            device=self.device,
            cost=self.cost,
            wake=self.wake,
            arrived=arrived,
            on_dead=self._note_death,
        )
        self.requests: list[Request] = []

    def _note_death(self) -> None:
        self.num_deaths += 1

    def submit(self, prompt: list[int], max_tokens: int, **more) -> Request:
        """A request that is under way."""
        request = make_request(
            prompt,
            max_tokens,
            stop_ids=[STOP_ID],
            cost=self.cost,
            totals=self.drafts,
            **more,
        )
        self.batcher.submit(request)
        self.requests.append(request)
        return request

    async def settle(self) -> None:
        """Until every request has ended."""
        async with asyncio.timeout(WAIT_S):
            while not all(request.ended for request in self.requests):
                await asyncio.sleep(0.001)

    def check_clean(self) -> None:
        """Nothing is held for requests that are over, and the books balance."""
        assert self.scheduler.check_integrity() == []
        totals = self.batcher.totals
        ended = totals.finished + totals.failed + totals.cancelled
        present = len(self.scheduler.running) + len(self.scheduler.waiting)
        assert totals.started == ended + present
        drafted = self.batcher.speculation.drafted
        open_tokens = sum(s.tail.num_open for s in self.hub.open_sequences)
        unused = sum(self.drafts.unused.values())
        assert self.drafts.num_proposed == drafted + unused + open_tokens
        if not present:
            assert self.pool.num_used == 0
            assert not self.hub.open_sequences
            assert not self.batcher._confirmed_at


@contextlib.asynccontextmanager
async def running_target(
    num_blocks: int = 64, max_sequences: int = 8, max_waiting: int = 100
) -> AsyncIterator[Target]:
    """A target that runs steps, checked at the end."""
    target = Target(num_blocks=num_blocks, max_sequences=max_sequences, max_waiting=max_waiting)
    target.batcher.start()
    try:
        yield target
        await target.settle()
        target.check_clean()
    finally:
        target.model.release()
        await target.batcher.stop()
        target.device.close()


def output_of(request: Request) -> CollectedOutput:
    """Where its tokens went."""
    assert isinstance(request.output, CollectedOutput)
    return request.output


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
        assert target.batcher.totals.draft_wait_s < 0.2


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
        assert len(target.hub.open_sequences) == 3
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


def make_stream(target: Target, max_tokens: int, stall_s: float, box: list[Request]) -> TokenStream:
    """A stream as the servicer makes it; the request goes into `box`."""
    return TokenStream(
        max_tokens,
        stall_s,
        on_drained=target.batcher.nudge,
        on_stall=lambda: target.batcher.stall(box[0]),
    )


async def test_a_full_stream_pauses_its_request_and_reading_resumes_it():
    """A slow reader gets the whole text, and never more than the limit and one round waits."""
    async with running_target() as target:
        box: list[Request] = []
        stream = make_stream(target, 6, 10.0, box)
        prompt = next([n] for n in range(1, 97) if len(solo([n], 60)) == 60)
        box.append(target.submit(prompt, 60, output=stream, mode=SpeculationMode.FIXED))
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
        stream.close()


async def test_a_stalled_reader_loses_its_request():
    """It takes nothing for `stall_s` although the stream is full: its blocks go to others."""
    async with running_target() as target:
        box: list[Request] = []
        stream = make_stream(target, 4, 0.05, box)
        prompt = next([n] for n in range(1, 97) if len(solo([n], 60)) == 60)
        box.append(target.submit(prompt, 60, output=stream))
        await target.settle()
        assert target.pool.num_used == 0
        assert target.batcher.totals.failed == 1
        with pytest.raises(Unavailable, match="not read"):
            await asyncio.wait_for(stream.get(), WAIT_S)


async def test_an_error_comes_behind_the_tokens_before_it():
    """What was made is delivered first, then the reason for the end."""
    async with running_target() as target:
        box: list[Request] = []
        stream = make_stream(target, 100, 10.0, box)
        target.model.fails = lambda request: request.num_generated >= 3
        box.append(target.submit([3, 3], 40, output=stream))
        await target.settle()
        ids: list[int] = []
        with pytest.raises(EngineFailed):
            while True:
                piece = await asyncio.wait_for(stream.get(), WAIT_S)
                ids += [token.id for token in piece.tokens]
        assert ids == solo([3, 3], 40)[:3]


async def test_an_idle_target_does_nothing():
    """Without work there are no steps, and paused requests do not make the loop spin."""
    async with running_target() as target:
        request = target.submit([3, 3], 10)
        output_of(request).full = True
        steps = []
        plan = target.scheduler.plan
        target.scheduler.plan = lambda drafts_of: steps.append(1) or plan(drafts_of)
        await asyncio.sleep(0.05)
        assert len(steps) <= 2
        assert target.model.num_steps <= 1
        output_of(request).full = False
        target.batcher.nudge()
        await target.settle()
        assert output_of(request).ids == solo([3, 3], 10)
