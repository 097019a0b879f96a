"""The block pool: nothing lost, nothing owned twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.block_pool import BlockPool, PoolExhausted

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 12)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_pool_agrees_with_the_tables_after_any_history(actions: list[tuple[str, int]]) -> None:
    """Whatever is allocated, shared and freed: counts match tables, and freeing all frees all."""
    pool = BlockPool(16)
    tables: list[list[int]] = []
    for action, number in actions:
        if action == "allocate":
            before = pool.num_free
            try:
                tables.append(pool.allocate(number))
            except PoolExhausted:
                assert number > before
                assert pool.num_free == before
        elif tables and action == "share":
            table = list(tables[number % len(tables)])
            pool.share(table)
            tables.append(table)
        elif tables:
            pool.free(tables.pop(number % len(tables)))
        assert pool.check_integrity(tables) == []
        assert pool.num_used == len({block for table in tables for block in table})
    for table in tables:
        pool.free(table)
    assert pool.num_free == 16
    assert pool.check_integrity([]) == []


def test_freeing_what_is_not_held_changes_nothing() -> None:
    """A table with one wrong block is refused whole."""
    pool = BlockPool(4)
    table = pool.allocate(2)
    for wrong in ([*table, 3], [*table, table[0]], [*table, 4], [*table, -1]):
        with pytest.raises(ValueError, match="references"):
            pool.free(wrong)
        assert pool.check_integrity([table]) == []
    with pytest.raises(ValueError, match="references"):
        pool.share([3])


def test_integrity_names_leaks_and_foreign_blocks() -> None:
    """A lost table, a table used twice without sharing and a foreign block are all reported."""
    pool = BlockPool(4)
    table = pool.allocate(1)
    assert pool.check_integrity([]) == ["block 0: in no table, 1 references"]
    assert pool.check_integrity([table, table]) == ["block 0: 2 tables, 1 references"]
    assert pool.check_integrity([table, [1]]) == ["block 1: 1 tables, 0 references"]
    assert pool.check_integrity([table, [7]]) == ["block 7 stands in a table but not in the pool"]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    """The last block may be partly used; no tokens need no block."""
    assert BlockPool(1).blocks_for(num_tokens) == num_blocks
