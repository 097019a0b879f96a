"""Token buckets against exact fractions: nothing is rounded, and waiting times are right."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.buckets import TokenBucket

MINUTE_NS = 60 * 10**9
rates = st.one_of(st.integers(1, 200), st.integers(1, 10**9))
steps = st.lists(st.tuples(st.integers(0, 3 * MINUTE_NS), st.integers(0, 10**4)), max_size=20)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_ns = 12_345

    def __call__(self) -> int:
        return self.now_ns


def test_a_minutes_worth_at_once() -> None:
    """It is full at first, gives all of it, and then a unit each sixtieth of a minute."""
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.retry_after_s(60) == 0
    bucket.spend(60)
    assert (bucket.retry_after_s(0), bucket.retry_after_s(1)) == (0, 1)
    clock.now_ns += 10**9
    assert (bucket.retry_after_s(1), bucket.retry_after_s(2)) == (0, 1)


def test_an_idle_year_saves_no_more_than_a_minute() -> None:
    """A bucket holds at most what a minute brings."""
    clock = Clock()
    bucket = TokenBucket(10, clock)
    clock.now_ns += 365 * 24 * 60 * MINUTE_NS
    bucket.spend(10)
    assert bucket.retry_after_s(1) == 6


def test_paid_afterwards() -> None:
    """What was spent beyond the level is owed, and the wait is as long as that takes to come in."""
    clock = Clock()
    bucket = TokenBucket(100, clock)
    bucket.spend(350)
    assert bucket.retry_after_s() == 150
    clock.now_ns += 2 * MINUTE_NS
    assert bucket.retry_after_s() == 30


@given(per_minute=rates, steps=steps)
def test_levels_are_exact(per_minute: int, steps: list[tuple[int, int]]) -> None:
    """After any sequence of waiting and spending the level is that of exact fractions."""
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    level = Fraction(per_minute)
    for wait_ns, num_units in steps:
        clock.now_ns += wait_ns
        level = min(level + Fraction(wait_ns * per_minute, MINUTE_NS), Fraction(per_minute))
        bucket.spend(num_units)
        level -= num_units
        assert (bucket.retry_after_s() == 0) == (level >= 0)
        assert bucket.retry_after_s(1) == pytest.approx(
            float(max(0, (1 - level) * 60 / per_minute)), abs=1e-9
        )


@given(per_minute=rates, spent=st.integers(0, 10**6), wanted=st.integers(0, 1))
def test_the_time_to_wait_is_enough_and_no_longer(per_minute: int, spent: int, wanted: int) -> None:
    """After it there is enough; a nanosecond earlier there was not."""
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    bucket.spend(spent)
    wait_ns = round(bucket.retry_after_s(wanted) * 1e9)
    if wait_ns:
        clock.now_ns += wait_ns - 1
        assert bucket.retry_after_s(wanted) > 0
        clock.now_ns += 1
    assert bucket.retry_after_s(wanted) == 0


@given(per_minute=st.integers(1, 100), waits=st.lists(st.integers(0, MINUTE_NS // 4), max_size=60))
def test_never_more_than_the_rate(per_minute: int, waits: list[int]) -> None:
    """Who takes whenever there is one gets a minute's worth and what time brings, no more."""
    clock = Clock()
    began_ns, taken = clock.now_ns, 0
    bucket = TokenBucket(per_minute, clock)
    for wait_ns in waits:
        clock.now_ns += wait_ns
        while not bucket.retry_after_s(1):
            bucket.spend(1)
            taken += 1
    elapsed = Fraction(clock.now_ns - began_ns, MINUTE_NS)
    assert taken <= per_minute + per_minute * elapsed


def test_another_rate() -> None:
    """It counts from the moment of the change; debts stay, and so does what has room."""
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.spend(120)
    clock.now_ns += MINUTE_NS // 2  # 30 of the 60 that are owed
    bucket.per_minute = 10
    assert bucket.retry_after_s() == 180
    clock.now_ns += 4 * MINUTE_NS
    bucket.per_minute = 100
    assert bucket.retry_after_s(10) == 0
    assert bucket.retry_after_s(11) == 0.6
    clock.now_ns += MINUTE_NS
    bucket.per_minute = 5
    assert (bucket.per_minute, bucket.retry_after_s(5), bucket.retry_after_s(6)) == (5, 0, 12)
