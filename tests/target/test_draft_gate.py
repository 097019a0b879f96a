"""Waiting for drafts: who waits, how long, and what is learned from it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.params import SpeculationMode
from target_service.draft_tail import ProposedTokens
from target_service.request import Request
from target_service.window import Wish
from tests.support.draft_scripts import (
    Crossing,
    Drafting,
    Empty,
    Perfect,
    Reply,
    ScriptedSequence,
)
from tests.support.function_target import WAIT_S, Target, output_of, running_target, solo
from tests.support.scripted_drafter import ScriptedDrafter
from tests.target.test_batcher_with_drafters import connected, known, long_prompt


class Waking:
    """Has nothing to say up to a length, and then is always right."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._behaviours = Empty(), Drafting(Perfect(known))

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        return self._behaviours[len(sequence.confirmed) >= self._length].answer(sequence)


def let_steps_last_until_answered(target: Target, request: Request) -> None:
    """A step without drafts ends once the drafter has answered: no answer to it is in time, and
    however busy the machine is, each round has one."""
    tail, answers = request.drafts.tail, threading.Semaphore(0)
    add = tail.add

    def add_and_release(proposal: ProposedTokens) -> None:
        add(proposal)
        answers.release()

    def fails_without_answer(_: Request) -> bool:
        asks = request.num_generated > 0 and request.room_for_drafts > 0
        return asks and not tail.tokens and not answers.acquire(timeout=WAIT_S)

    tail.add = add_and_release  # type: ignore[method-assign]
    target.model.fails = fails_without_answer


async def test_a_drafter_that_has_nothing_to_say_is_not_given_up() -> None:
    """It answers after the step began, where steps do not wait; and it is asked again at every
    round."""
    async with (
        ScriptedDrafter(Empty()) as drafter,
        running_target(drafter.address) as target,
    ):
        await connected(target)
        prompt = long_prompt(5)
        request = target.submit(prompt, 30, mode=SpeculationMode.AUTO, max_wait_s=0.0)
        let_steps_last_until_answered(target, request)
        await target.settle()
        assert output_of(request).ids == solo(prompt, 30)
        asked = [window > 0 for window in drafter.record.windows(1)]
        # The first token waits for nothing, and the last never needs drafts; all others do.
        assert asked.count(True) == 28


async def test_good_drafts_after_many_empty_answers_are_used_at_once() -> None:
    """A text that begins to repeat itself profits from the first repetition on."""
    prompt = long_prompt(6)
    async with (
        ScriptedDrafter(Waking(len(prompt) + 25)) as drafter,
        running_target(drafter.address) as target,
    ):
        await connected(target)
        request = target.submit(prompt, 55, mode=SpeculationMode.AUTO)
        let_steps_last_until_answered(target, request)
        await target.settle()
        assert output_of(request).ids == solo(prompt, 55)
        assert request.counts.accepted >= 15


async def test_drafts_that_come_three_updates_late_are_used() -> None:
    """The drafter is let run ahead as far as the text gets while a proposal is on its way."""
    crossing = Crossing(Drafting(Perfect(known)), 3)
    async with ScriptedDrafter(crossing) as drafter, running_target(drafter.address) as target:
        await connected(target)
        prompt = long_prompt(7)
        target.model.step_s = 0.01
        auto = SpeculationMode.AUTO
        request = target.submit(prompt, 55, mode=auto, draft_tokens=2, max_wait_s=0.0)
        await target.settle()
        assert output_of(request).ids == solo(prompt, 55)
        assert max(drafter.record.windows(1)) > 2 * 2 + 1
        assert request.counts.accepted == request.counts.drafted >= 10


async def test_one_slow_sequence_costs_its_neighbours_their_share_only() -> None:
    """With four in the step, one that lacks drafts makes it wait a quarter of its own patience."""
    async with running_target() as target:
        wish = Wish(2, 5, 0.2)
        lonely = target.submit(long_prompt(1), 20, mode=SpeculationMode.AUTO)
        others = [target.submit(long_prompt(n), 20) for n in (2, 3, 4)]
        lonely.window.wish = lambda now_s, lag: wish  # type: ignore[method-assign]
        target.hub.late = True
        waited = target.batcher.draft_wait_s
        while target.model.num_steps < 4:
            await asyncio.sleep(0.001)
        steps, waited = target.model.num_steps, target.batcher.draft_wait_s - waited
        assert waited <= steps * (0.2 / 4 + 0.02)
        for request in [lonely, *others]:
            target.batcher.cancel(request)


async def test_a_wait_that_was_cut_short_counts_as_long_as_it_was() -> None:
    """One of four gives up after a quarter of what waiting is worth to it: all that it has learned
    is that its drafts take longer than that quarter."""
    async with running_target() as target:
        wish = Wish(2, 5, 1.0)
        lonely = target.submit(long_prompt(1), 20, mode=SpeculationMode.AUTO)
        others = [target.submit(long_prompt(n), 20) for n in (2, 3, 4)]
        learned: list[float] = []
        lonely.window.wish = lambda now_s, lag: wish  # type: ignore[method-assign]
        lonely.window.observe_latency = learned.append  # type: ignore[method-assign]
        target.hub.late = True
        while not learned:
            await asyncio.sleep(0.001)
        assert learned[0] == pytest.approx(2 * 0.25)
        for request in [lonely, *others]:
            target.batcher.cancel(request)
