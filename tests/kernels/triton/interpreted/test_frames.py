"""Steps in memory of one size: what the device makes of tiles is what the host would have made."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from outrider_kernels.triton_ops.frames import MOST_SPLITS, Frames
from outrider_kernels.triton_ops.spread import spread
from outrider_kernels.triton_ops.work import plan_attention

PAGE = 16
MOST_ROWS, MOST_KEYS, MOST_PLACES = 40, 2048, 800
Share = tuple[int, int]
"""Tokens before the step, and in it."""


def make_frames(
    max_tile: int = 128, cache_keys: int = 20 * 512, most_keys: int = MOST_KEYS
) -> Frames:
    """Of a model with 6 heads on 2."""
    return Frames(
        torch.device("cpu"), most_rows=MOST_ROWS, most_places=MOST_PLACES, most_keys=most_keys,
        cache_keys=cache_keys, num_heads=6, kv_heads=2, max_tile=max_tile, spread=spread,
    )  # fmt: skip


def check_equal(
    frames: Frames, max_tile: int, num_rows: int, shares: list[Share], rng: random.Random
) -> None:
    """Fill a frame, spread it, compare all with the plan of a step that is not captured."""
    frame = frames.frame(num_rows)
    lens, starts = [n for _, n in shares], [start for start, _ in shares]
    tables = [rng.sample(range(100, 999), -(-(start + n) // PAGE)) for start, n in shares]
    layout = np.full(frames.layout.numel(), -7, np.int32)
    place, places = frames.tables, []
    for table in tables:
        places.append(place)
        layout[place : place + len(table)] = table
        place += len(table) + rng.randrange(3)
    ids = [rng.randrange(1000) for _ in range(sum(lens))]
    wanted = sorted(rng.sample(range(len(ids)), rng.randint(0, len(ids))))
    assert frames.fill(layout, frame, ids, wanted, lens, starts, places)
    frames.layout.copy_(torch.from_numpy(layout))
    frame.spread()

    padding = num_rows - len(ids)
    assert frame.token_ids.tolist() == ids + [0] * padding
    assert frame.logit_rows.tolist() == wanted + [0] * (num_rows - len(wanted))
    at = [start + i for start, n in shares for i in range(n)]
    assert frame.positions.tolist() == at + [0] * padding
    slots = [
        table[place // PAGE] * PAGE + place % PAGE
        for (start, n), table in zip(shares, tables, strict=True)
        for place in range(start, start + n)
    ]
    assert frame.slots.tolist() == slots + [-1] * padding
    plan = plan_attention(
        lens, starts, tables, block_size=PAGE, num_heads=6, kv_heads=2, num_rows=num_rows,
        max_tile=max_tile,
    )  # fmt: skip
    (units,), merges, blocks = frame.attention.parts()
    (planned_units,), planned_merges, planned_blocks = plan.parts()
    assert frame.attention.launches[0][0] == plan.launches[0][0]
    assert frame.attention.num_partials >= plan.num_partials
    units, planned_units = units.view(-1, 8), planned_units.view(-1, 8)
    for found, planned in zip(units, planned_units, strict=False):
        if planned[5]:  # it has keys, and so a table
            last = int(planned[5] - 1) // PAGE
            assert blocks[found[3] + last] == planned_blocks[planned[3] + last]
            assert blocks[found[3]] == planned_blocks[planned[3]]
    columns = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(units[: len(planned_units), columns], planned_units[:, columns])
    assert (units[len(planned_units) :, 1] == 0).all()
    merges, planned_merges = merges.view(-1, 4), planned_merges.view(-1, 4)
    assert torch.equal(merges[: len(planned_merges)], planned_merges)
    assert (merges[len(planned_merges) :, 3] == 0).all()


@pytest.mark.parametrize("max_tile", [32, 128])
def test_steps_are_spread_as_they_would_be_planned(max_tile: int) -> None:
    """Singles, drafts, chunks over several tiles, contexts over several splits; padding or none."""
    rng, frames = random.Random(0), make_frames(max_tile)
    for num_rows, shares in [
        (1, [(0, 1)]),
        (1, [(1535, 1)]),
        (8, [(511, 1), (510, 3), (3, 2)]),
        (8, [(511, 4), (512, 4)]),
        (40, [(1020, 9), (0, 20), (1500, 1)]),
        (40, [(0, 1)]),
        (24, [(20, 1)] * 17),
    ]:  # fmt: skip
        check_equal(frames, max_tile, num_rows, shares, rng)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps_are_spread_as_they_would_be_planned(seed: int) -> None:
    """The same with random ones, in the memory that the one before them left."""
    rng = random.Random(seed)
    max_tile = rng.choice([32, 128])
    frames = make_frames(max_tile)
    for _ in range(20):
        num_rows, shares, left = rng.randint(1, MOST_ROWS), [], rng.randint(1, MOST_ROWS)
        left = min(left, num_rows)
        while left > 0:
            count = min(left, rng.choice([1, 1, 2, 5, 9, 17]))
            shares.append((rng.choice([0, 3, 511, 512, 700]), count))
            left -= count
        check_equal(frames, max_tile, num_rows, shares, rng)


def test_steps_that_need_more_than_there_is_do_not_fit() -> None:
    """Units of long contexts beyond what the cache holds, as shared beginnings can have them."""
    frames = make_frames(cache_keys=4 * 512)
    layout, frame = np.zeros(frames.layout.numel(), np.int32), frames.frame(8)
    for count, fits in ((5, True), (6, False)):
        nothing = [0] * count
        found = frames.fill(layout, frame, nothing, [], [1] * count, [700] * count, nothing)
        # Each has two units, padding has one; there is one for each row, and four more.
        assert found == fits, count
    largest = make_frames(cache_keys=1 << 40, most_keys=1 << 20).frame(8)
    ((_, num_units),) = largest.attention.launches
    assert num_units == 8 + MOST_SPLITS
