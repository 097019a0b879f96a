"""The compiled attention's plan: which tiles and units it cuts a step into."""

from __future__ import annotations

import numpy as np
import pytest

from outrider_kernels.native_attention import SPLIT_KEYS, NativePlan, plan_attention

KV_HEADS = 3
STEPS = {
    "one token": ([1], [300]),
    "tokens of many": ([1] * 7, [0, 15, 255, 256, 511, 700, 31]),
    "drafts": ([5, 1, 9], [250, 16, 509]),
    "a prompt beside a token": ([100, 1], [200, 77]),
}


def plan_of(lens: list[int], starts: list[int]) -> NativePlan:
    """Of sequences whose blocks are numbered from the end backwards."""
    tables = [
        [1000 - 100 * i - n for n in range(-(-(start + length) // 16) + 1)]
        for i, (length, start) in enumerate(zip(lens, starts, strict=True))
    ]
    return plan_attention(
        lens, starts, tables, block_size=16, num_heads=9, kv_heads=KV_HEADS, num_rows=sum(lens)
    )


@pytest.mark.parametrize("name", STEPS)
def test_every_row_and_split_has_its_place_once(name: str) -> None:
    """Tiles cover the rows in order, at their positions and blocks; units all their splits."""
    lens, starts = STEPS[name]
    plan = plan_of(lens, starts)
    wanted = [
        (start + place, 1000 - 100 * i)
        for i, (length, start) in enumerate(zip(lens, starts, strict=True))
        for place in range(length)
    ]
    found = []
    for row, num_tokens, position, table, splits, _ in plan.tiles.tolist():
        assert row == len(found)
        found += [(position + i, int(plan.blocks[table])) for i in range(num_tokens)]
        assert splits == -(-(position + num_tokens) // SPLIT_KEYS)
    assert found == wanted
    shared = np.zeros((len(plan.tiles), plan.tiles[:, 4].max(), KV_HEADS), dtype=int)
    for tile, begin, end, head_begin, head_end in plan.units.tolist():
        shared[tile, begin:end, head_begin:head_end] += 1
    for tile, splits in enumerate(plan.tiles[:, 4]):
        assert (shared[tile, :splits] == 1).all() and not shared[tile, splits:].any()


def test_steps_of_equal_shape_share_only_what_nobody_writes() -> None:
    """The next step of a text has numbers of its own; the first one's stay as they were."""
    first = plan_of([1, 1], [20, 300])
    before = first.tiles.copy()
    first.num_done[0] = 7
    second = plan_of([1, 1], [21, 301])
    assert second.tiles[:, 2].tolist() == [21, 301]
    assert not second.num_done.any()
    assert np.array_equal(first.tiles, before)
    assert second.units is first.units
