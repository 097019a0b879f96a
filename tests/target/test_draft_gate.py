"""Waiting for drafts: who waits, how long, and what is learned from it."""

from __future__ import annotations

import asyncio

import pytest

from outrider.params import SpeculationMode
from target_service.window import Wish
from tests.support.draft_scripts import Crossing, Drafting, Empty, Perfect
from tests.support.function_target import output_of, running_target, solo
from tests.support.scripted_drafter import ScriptedDrafter
from tests.target.test_batcher_with_drafters import connected, known, long_prompt


async def test_a_drafter_that_has_nothing_to_say_is_not_given_up() -> None:
    """It answers at once, so it costs no wait, and it is asked again at every round."""
    async with (
        ScriptedDrafter(Empty()) as drafter,
        running_target(drafter.address) as target,
    ):
        await connected(target)
        prompt = long_prompt(5)
        target.model.step_s = 0.002
        request = target.submit(prompt, 50, mode=SpeculationMode.AUTO)
        await target.settle()
        assert output_of(request).ids == solo(prompt, 50)
        asked = [update.window > 0 for update in drafter.record.of(1)]
        # The last token never needs drafts; all the other rounds do.
        assert sum(asked) >= 45


async def test_good_drafts_after_many_empty_answers_are_used_at_once() -> None:
    """A text that begins to repeat itself profits from the first repetition on."""
    async with (
        ScriptedDrafter(Empty()) as drafter,
        running_target(drafter.address) as target,
    ):
        await connected(target)
        prompt = long_prompt(6)
        target.model.step_s = 0.002
        request = target.submit(prompt, 55, mode=SpeculationMode.AUTO)
        while request.num_generated < 25:
            await asyncio.sleep(0.001)
        drafter.behaviour = Drafting(Perfect(known))
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
