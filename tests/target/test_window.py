"""The window controller against simulated drafters, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from outrider.params import SpeculationMode, SpeculationParams
from target_service.window import (
    FIXED_WAIT_S,
    NO_DRAFTS,
    Round,
    SequenceWindow,
    StepCost,
    Wish,
)

CAP, MAX_WINDOW, MAX_WAIT_S, STEP_S = 8, 16, 0.05, 0.04


def make_window(
    mode: SpeculationMode = SpeculationMode.AUTO,
    cap: int | None = None,
    *,
    cost: StepCost | None = None,
    max_draft_tokens: int = CAP,
    max_window: int = MAX_WINDOW,
) -> SequenceWindow:
    """The controller of one sequence."""
    return SequenceWindow(
        SpeculationParams(mode=mode, max_draft_tokens=cap),
        cost or measured_cost(),
        max_draft_tokens=max_draft_tokens,
        max_window=max_window,
        max_wait_s=MAX_WAIT_S,
    )


def measured_cost(
    base_s: float = STEP_S, row_s: float = 0.0005, noise: float = 0.0, seed: int = 0
) -> StepCost:
    """A cost that has seen steps of 1 to 9 rows."""
    cost, rng = StepCost(), random.Random(seed)
    for index in range(100):
        rows = 1 + index % 9
        cost.observe(rows, (base_s + row_s * rows) * rng.uniform(1 - noise, 1 + noise))
    return cost


@dataclass
class Simulation:
    """Rounds one after another, as the batcher runs them."""

    window: SequenceWindow
    accept: Callable[[float], bool]
    """Whether one draft stands, at this time."""
    latency_s: float = 0.001
    """From confirming to having drafts; when no step waits this long there are none."""
    empty: bool = False
    """The drafter answers that it has nothing; each round hears one such answer, in time or not."""
    share: float = 1.0
    """Of those in a step, who gain by waiting."""
    now_s: float = 0.0
    wishes: list[Wish] = field(default_factory=list)
    waited_s: float = 0.0

    def run(self, num_rounds: int) -> list[Wish]:
        """The wishes of the next rounds."""
        for _ in range(num_rounds):
            self._round()
        return self.wishes[-num_rounds:]

    def _round(self) -> None:
        wish = self.window.wish(self.now_s)
        self.wishes.append(wish)
        if wish.k == 0:
            self.now_s += STEP_S
            return
        wait_s = self.window.wait_s(wish, self.share)
        there = self.latency_s <= wait_s
        waited = min(self.latency_s, wait_s)
        if there:
            self.window.observe_latency(waited)
        elif wait_s:
            self.window.observe_latency(2 * wait_s)
        self.waited_s += waited
        self.now_s += waited + STEP_S
        drafted = wish.k if there and not self.empty else 0
        accepted = 0
        while accepted < drafted and self.accept(self.now_s):
            accepted += 1
        self.window.observe(Round(drafted, accepted, self.empty), self.now_s)


def test_perfect_drafts_reach_the_cap_and_stay_there():
    """Nothing is ever rejected, so every round verifies as many as it may."""
    simulation = Simulation(make_window(), lambda _: True)
    simulation.run(10)
    assert {wish.k for wish in simulation.run(50)} == {CAP}


def test_wrong_drafts_cost_little_and_are_given_up():
    """Over a long text, only a few rounds verify drafts that never stand."""
    simulation = Simulation(make_window(), lambda _: False)
    simulation.run(40)
    late = simulation.run(500)
    drafted = sum(wish.k for wish in late)
    assert sum(wish.k > 0 for wish in late) <= 0.05 * len(late)
    assert drafted <= 0.1 * len(late)
    assert simulation.waited_s <= 0.02 * simulation.now_s


def test_it_recovers_once_drafts_become_good():
    """A probe finds out, at the latest after the longest pause, and k rises to the cap again."""
    good_from_s = 60.0
    simulation = Simulation(make_window(), lambda now_s: now_s > good_from_s)
    while simulation.now_s < good_from_s:
        simulation.run(1)
    assert simulation.wishes[-1].k == 0
    while simulation.now_s < good_from_s + 6.0:
        simulation.run(1)
    assert {wish.k for wish in simulation.run(20)} == {CAP}


def test_half_good_drafts_are_used_with_a_moderate_k():
    """It neither gives up nor verifies what will hardly ever stand."""
    rng = random.Random(1)
    cost = measured_cost(row_s=0.004)
    simulation = Simulation(make_window(cost=cost), lambda _: rng.random() < 0.5)
    simulation.run(20)
    ks = [wish.k for wish in simulation.run(200)]
    assert 1 <= sum(ks) / len(ks) <= 4


def test_late_drafts_are_probed_rarely():
    """Drafts that never come in time are asked for seldom, and no step waits long for them."""
    simulation = Simulation(make_window(), lambda _: True, latency_s=10.0)
    simulation.run(20)
    waited = simulation.waited_s
    late = simulation.run(1000)
    assert sum(wish.k > 0 for wish in late) <= 0.15 * len(late)
    assert simulation.waited_s - waited <= 0.03 * 1000 * STEP_S


def test_a_drafter_in_time_again_is_used_again():
    """Too late for a while, then quick: the cap is reached again within a few seconds."""
    simulation = Simulation(make_window(), lambda _: True, latency_s=10.0)
    simulation.run(1000)
    simulation.latency_s = 0.001
    until_s = simulation.now_s + 6.0
    while simulation.now_s < until_s:
        simulation.run(1)
    assert {wish.k for wish in simulation.run(20)} == {CAP}


def test_a_drafter_without_ideas_stays_in_use():
    """It says at once that it has nothing: that costs nothing, and it may have something soon."""
    simulation = Simulation(make_window(), lambda _: True, empty=True)
    simulation.run(50)
    simulation.empty = False
    assert simulation.run(5)[-1].k == CAP


@pytest.mark.parametrize("latency_s", [STEP_S / 2, 10 * STEP_S])
def test_a_drafter_without_ideas_soon_costs_no_wait(latency_s):
    """It is slow to say that it has nothing: it is asked all the time, but waited for no longer
    than what is to be expected of it is worth. With its first drafts that is much again."""
    simulation = Simulation(make_window(), lambda _: True, latency_s, empty=True)
    wishes = simulation.run(300)
    assert all(wish.k == CAP for wish in wishes)
    assert simulation.waited_s < 0.03 * 300 * STEP_S
    assert wishes[-1].worth_s < 0.01 * wishes[0].worth_s
    for _ in range(5):
        simulation.window.observe(Round(CAP, CAP, answered=False), simulation.now_s)
    assert simulation.window.wish(simulation.now_s).worth_s > 0.4 * wishes[0].worth_s


@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.FIXED])
@pytest.mark.parametrize("cap", [1, 3, CAP])
def test_a_request_never_gets_more_than_its_cap(mode, cap):
    """The request's limit holds for every round; FIXED means exactly that many."""
    simulation = Simulation(make_window(mode, cap), lambda _: True)
    ks = [wish.k for wish in simulation.run(50)]
    assert max(ks) == cap
    if mode is SpeculationMode.FIXED:
        assert min(ks) == cap


@pytest.mark.parametrize(("mode", "cap"), [("off", None), ("auto", 0), ("fixed", 0)])
def test_no_drafts_are_wanted_where_none_may_be_used(mode, cap):
    """OFF, or a cap of 0, asks for nothing and never waits."""
    window = make_window(SpeculationMode(mode), cap)
    assert not window.wants_drafts
    assert window.wish(0.0) == NO_DRAFTS


def test_fixed_keeps_asking_whatever_happens():
    """FIXED is for measuring: neither wrong nor missing drafts change k."""
    wrong = Simulation(make_window(SpeculationMode.FIXED, 4), lambda _: False)
    late = Simulation(make_window(SpeculationMode.FIXED, 4), lambda _: True, latency_s=10.0)
    assert {wish.k for wish in wrong.run(100) + late.run(100)} == {4}
    assert all(wrong.window.wait_s(wish, 1.0) > 0 for wish in wrong.wishes)


@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.FIXED])
@pytest.mark.parametrize("max_window", [0, 1, 4])
def test_a_round_never_needs_more_than_the_window(mode, max_window):
    """Drafts beyond the window never come, so no step may wait for them."""
    window = make_window(mode, max_window=max_window)
    assert window.wants_drafts == (max_window > 0)
    wish = window.wish(0.0)
    assert wish.k <= wish.window <= max_window


def test_the_window_covers_what_is_confirmed_while_drafts_are_on_their_way():
    """It is twice the round at least, and never more than the most that is allowed."""
    window = make_window(cap=3)
    sizes = [window.wish(0.0, lag).window for lag in (0.0, 4.0, 4.5, 12.0, 100.0)]
    assert sizes == [7, 7, 8, 15, MAX_WINDOW]


def test_no_wait_beyond_its_limit_nor_for_what_comes_too_late():
    """The wait is worth at most what drafts save, and 0 once they are known to be late."""
    rng = random.Random(2)
    window = make_window()
    simulation = Simulation(window, lambda _: rng.random() < 0.7)
    assert all(0 <= wish.worth_s <= MAX_WAIT_S for wish in simulation.run(200))
    for _ in range(20):
        window.observe_latency(1.0)
    assert window.wait_s(window.wish(simulation.now_s), 1.0) == 0
    assert make_window(cost=StepCost()).wish(0.0).worth_s <= MAX_WAIT_S
    tiny = make_window(cost=measured_cost(base_s=0.001, row_s=0.0))
    assert tiny.wish(0.0).worth_s < 0.003


def test_a_wait_is_cut_to_the_share_that_gains_and_is_worth_it_or_not_made():
    """Drafts that take half as long as they are worth: alone a sequence waits for them; where it is
    one of four, waiting would be in vain, and so there is none. FIXED waits in any case."""
    window = make_window()
    wish = window.wish(0.0)
    assert window.wait_s(wish, 0.25) == wish.worth_s / 4
    window.observe_latency(wish.worth_s / 2)
    assert window.wait_s(wish, 0.25) == 0
    assert window.wait_s(wish, 1.0) == wish.worth_s
    fixed = make_window(SpeculationMode.FIXED, 4)
    fixed.observe_latency(100.0)
    assert fixed.wait_s(fixed.wish(0.0), 0.25) == FIXED_WAIT_S


def test_short_waits_in_vain_are_tried_again_but_not_at_every_step():
    """Beside three others, for drafts that come a little later than its share of patience."""
    window = make_window()
    worth_s = window.wish(0.0).worth_s
    simulation = Simulation(window, lambda _: True, latency_s=worth_s / 2, share=0.25)
    simulation.run(100)
    assert 0 < simulation.waited_s < 0.2 * 100 * worth_s / 4


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_a_row_survives_noise(seed):
    """With 20 % of noise in each step, the share stays near the true 1.2 %."""
    cost = measured_cost(noise=0.2, seed=seed)
    assert cost.row_share < 0.05
    assert cost.step_s == pytest.approx(STEP_S, rel=0.25)


def test_one_slow_step_does_not_make_rows_look_dear():
    """A step that was held up for half a second is an accident, not the price of its rows."""
    cost = measured_cost()
    for rows in (9, 8, 9):
        cost.observe(rows, 0.5)
        for _ in range(5):
            cost.observe(1, STEP_S)
    assert cost.row_share < 0.1


@pytest.mark.parametrize("rows", [[1], [1] * 100, [4, 4, 4, 4]])
def test_the_cost_of_a_row_is_assumed_until_it_is_measured(rows):
    """Steps that all have the same size say nothing about one more row."""
    cost = StepCost()
    for count in rows:
        cost.observe(count, random.Random(count).uniform(0.03, 0.05))
    assert 0 < cost.row_share < 0.1
