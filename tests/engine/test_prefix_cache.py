"""Named blocks: contents stay to be found until the block is needed, and only then."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.block_pool import BlockPool
from outrider.engine.prefix import BlockChain

SIZE = 4


def names_of(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    """The names of all full blocks."""
    return BlockChain(salt, SIZE).names(token_ids, len(token_ids))


def test_a_name_covers_everything_before_the_block() -> None:
    """Equal blocks behind different beginnings, or under another salt, have different names."""
    one, two = names_of([1, 2, 3, 4, 5, 6, 7, 8]), names_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert not set(one) & set(two)
    assert not set(one) & set(names_of([1, 2, 3, 4, 5, 6, 7, 8], salt=b"tenant"))
    assert names_of([1, 2, 3, 4, 5, 6, 7, 8, 9])[:2] == one


def test_a_chain_grows_with_its_sequence_and_can_be_asked_for_less() -> None:
    """Names do not depend on when they were asked for."""
    ids = list(range(40))
    chain = BlockChain(b"", SIZE)
    assert chain.names(ids, 7) == names_of(ids[:7])
    assert chain.names(ids, 40) == names_of(ids)
    assert chain.names(ids, 9) == names_of(ids[:9])


def test_freed_blocks_are_found_until_they_are_needed() -> None:
    """A cached block counts as free, can be shared, and is forgotten when it is taken back."""
    pool = BlockPool(4, SIZE)
    names = names_of(list(range(8)))
    blocks = pool.allocate(2)
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    assert pool.find(names) == blocks
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 2, 0)
    assert pool.num_cached_among(blocks) == 2
    pool.share(pool.find(names))
    assert (pool.num_free, pool.num_used) == (2, 2)
    pool.free(blocks)
    pool.allocate(3)  # two that nobody named, then the end of the chain
    assert pool.find(names) == blocks[:1]
    assert pool.check_integrity([]) != []  # the three blocks stand in no table here


def test_the_least_recently_used_chain_goes_first() -> None:
    """Using a chain again keeps it; of one chain the end goes before the beginning."""
    pool = BlockPool(4, SIZE)
    old, new = names_of([1] * 8), names_of([2] * 8)
    for names in (old, new):
        blocks = pool.allocate(2)
        for block, name in zip(blocks, names, strict=True):
            pool.name(block, name)
        pool.free(blocks)
    again = pool.find(old)
    pool.share(again)
    pool.free(again)
    pool.allocate(1)
    assert len(pool.find(old)) == 2
    assert len(pool.find(new)) == 1


def test_two_blocks_with_the_same_contents_keep_one_name() -> None:
    """Two sequences that computed the same at once: one block is found, both are freed."""
    pool = BlockPool(4, SIZE)
    (name,) = names_of([1, 2, 3, 4])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.name(first[0], name)
    pool.name(second[0], name)
    pool.free(first)
    pool.free(second)
    assert pool.find([name]) == first
    assert (pool.num_cached, pool.num_free) == (1, 4)


def test_a_free_block_can_be_neither_named_nor_shared() -> None:
    """A mistake is refused and changes nothing."""
    pool = BlockPool(2, SIZE)
    with pytest.raises(ValueError, match="references"):
        pool.name(0, b"x")
    with pytest.raises(ValueError, match="no name"):
        pool.share([0])
    assert pool.check_integrity([]) == []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.booleans()), max_size=40))
def test_found_blocks_hold_what_their_names_say(jobs: list[tuple[int, int, bool]]) -> None:
    """After any history of sequences with shared beginnings, a found block was written with it."""
    pool = BlockPool(12, SIZE)
    contents: dict[int, bytes] = {}
    held: list[list[int]] = []
    for family, length, release in jobs:
        names = names_of([family] * length)
        found = pool.find(names)
        assert all(contents[b] == n for b, n in zip(found, names, strict=False))
        missing = len(names) - len(found)
        if missing > pool.num_free - pool.num_cached_among(found):
            while held:
                pool.free(held.pop())
            continue
        pool.share(found)
        table = found + pool.allocate(missing)
        for block, name in zip(table, names, strict=True):
            if block not in found:
                contents[block] = name
            pool.name(block, name)
        if release:
            pool.free(table)
        else:
            held.append(table)
        assert pool.check_integrity(held) == []
    for table in held:
        pool.free(table)
    assert pool.num_free == 12
