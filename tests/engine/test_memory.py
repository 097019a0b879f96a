"""The pool's size: every way to ask for it, and what cannot be had."""

from __future__ import annotations

import pytest

from outrider.engine.memory import DoesNotFit, PoolSize, free_host_bytes

FREE = 10_000


@pytest.mark.parametrize(
    ("size", "num_blocks"),
    [
        (PoolSize(tokens=160), 10),
        (PoolSize(tokens=175), 10),
        (PoolSize(blocks=7), 7),
        (PoolSize(num_bytes=999), 9),
        (PoolSize(fraction=0.5), 50),
        (PoolSize(tokens=1600), 100),
    ],
)
def test_each_way_to_ask(size: PoolSize, num_blocks: int) -> None:
    """Blocks of 16 tokens and 100 bytes; parts of a block do not count."""
    assert size.num_blocks(100, 16, FREE) == num_blocks


def test_nothing_asked_gives_the_default() -> None:
    """16,384 tokens."""
    assert PoolSize().num_blocks(1, 16, FREE) == 1024


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (PoolSize(tokens=160, blocks=3), "more than once"),
        (PoolSize(tokens=15), "not hold one block"),
        (PoolSize(num_bytes=99), "not hold one block"),
        (PoolSize(blocks=101), "are free"),
    ],
)
def test_what_cannot_be_had_is_said(size: PoolSize, said: str) -> None:
    """At start, not when the memory runs out."""
    with pytest.raises(DoesNotFit, match=said):
        size.num_blocks(100, 16, FREE)


def test_free_memory_is_a_number_of_bytes() -> None:
    """More than nothing, on any machine."""
    assert free_host_bytes() > 0
