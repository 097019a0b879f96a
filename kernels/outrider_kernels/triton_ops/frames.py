"""Memory of steps that a captured graph computes: in the same place and of the same size each time.

The host writes what it alone knows into a layout that reaches the device in one copy; the first
kernel of a graph (spread.py) makes of it what the other ones read. All of it is int32:

    ids      of the tokens, one a row
    wanted   rows whose logits are wanted
    tiles    attention's tiles of invariant mode, a line each: first row, tokens, position of the
             first, place of its block table (-1: rows that are padding), keys, first unit, first
             merge, first partial row (-1: a single split); a last line begins where all rows, units
             and merges end, and those behind it begin nowhere
    tables   block tables, each anywhere
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.triton_ops.configs import INVARIANT_SPLIT
from outrider_kernels.triton_ops.work import (
    MERGE_FIELDS,
    UNIT_FIELDS,
    Work,
    cut_tiles,
    invariant_tile,
)

TILE_FIELDS = 8
MOST_SPLITS = 1024
"""Beyond one for each row: every unit is a program for each KV head in every layer, whether a step
has that many or not."""
_NOWHERE = np.iinfo(np.int32).max

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Frame:
    """Steps of one size; tensors are what the model reads, views of memory that frames share."""

    num_rows: int
    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], -1 for rows that are padding
    logit_rows: torch.Tensor  # int64 [num_rows]
    attention: Work
    spread: Callable[[], None]
    """Makes all of that of what was copied; the first thing in a graph."""


class Frames:
    """The memory on a device, and the layout of what is copied there."""

    def __init__(
        self,
        device: torch.device,
        *,
        most_rows: int,
        most_places: int,
        most_keys: int,
        cache_keys: int,
        num_heads: int,
        kv_heads: int,
        max_tile: int,
        spread: Callable[..., None],
    ) -> None:
        """most_keys: of a sequence; cache_keys: of the cache; most_places: blocks of all tables.

        spread: the launcher of spread.py; max_tile: as for `work.plan_attention`.
        """
        self._group = num_heads // kv_heads
        self._tile_rows = invariant_tile(self._group, max_tile)
        self._most_splits = -(-most_keys // INVARIANT_SPLIT)
        self._cache_splits = cache_keys // INVARIANT_SPLIT
        self._launch = spread
        padded = -(-most_rows // 4) * 4  # each part begins at a multiple of 16 bytes
        self._tiles = 2 * padded
        self.tables = self._tiles + (padded + 4) * TILE_FIELDS
        """Where block tables begin in the layout, which ends most_places behind it."""
        self._wanted = padded
        before = self._num_units(most_rows) * UNIT_FIELDS + padded * MERGE_FIELDS
        memory = torch.zeros(before + self.tables + most_places, dtype=torch.int32, device=device)
        # Plans lie in front of what is copied, which is then what they have in place of blocks.
        self._memory, self._before, self.layout = memory, before, memory[before:]
        self._numbers = torch.zeros(4, padded, dtype=torch.int64, device=device)

    def _num_units(self, num_rows: int) -> int:
        """Room for units: of every sequence that fits the cache, up to a limit."""
        more = min(num_rows * (self._most_splits - 1), self._cache_splits, MOST_SPLITS)
        return num_rows + more

    def frame(self, num_rows: int) -> Frame:
        """For steps of up to num_rows <= most_rows rows."""
        num_units, num_tokens = self._num_units(num_rows), self._tile_rows // self._group
        num_units_ints, num_merges_ints = num_units * UNIT_FIELDS, num_rows * MERGE_FIELDS
        begin = self._before - num_units_ints - num_merges_ints
        work = Work(
            self._memory[begin:],
            ((self._tile_rows, num_units),),
            num_rows,
            self.layout.numel(),
            min(num_rows * self._most_splits, num_units * num_tokens),
        )
        (units,), merges, layout = work.parts()
        numbers = self._numbers[:, :num_rows]

        def spread() -> None:
            tiles, wanted = layout[self._tiles :], layout[self._wanted :]
            self._launch(tiles, layout, layout, wanted, numbers, units, merges)

        ids, positions, slots, logit_rows = numbers.unbind(0)
        return Frame(num_rows, ids, positions, slots, logit_rows, work, spread)

    def fill(
        self,
        layout: Array,
        frame: Frame,
        ids: Sequence[int],
        wanted: Sequence[int],
        lens: Sequence[int],
        starts: Sequence[int],
        places: Sequence[int],
    ) -> bool:
        """Write a step of at most frame.num_rows rows; False if it does not fit the frame.

        Sequence i forwards lens[i] >= 1 tokens from position starts[i]; its block table has been
        written at places[i] of the layout, host memory like that on the device.
        """
        num_rows = frame.num_rows
        table, num_partials = tile_table(
            lens, starts, places, num_rows, self._tile_rows // self._group
        )
        (_, num_units), *_ = frame.attention.launches
        if table[-1, 5] > num_units or num_partials > frame.attention.num_partials:
            return False
        for begin, numbers in ((0, ids), (self._wanted, wanted)):
            layout[begin : begin + len(numbers)] = numbers
            layout[begin + len(numbers) : begin + num_rows] = 0
        lines = layout[self._tiles : self._tiles + (num_rows + 1) * TILE_FIELDS]
        lines = lines.reshape(-1, TILE_FIELDS)  # of a part in one piece: a view
        lines[: len(table)] = table
        lines[len(table) :] = _NOWHERE
        return True


def tile_table(
    lens: Sequence[int],
    starts: Sequence[int],
    places: Sequence[int],
    num_rows: int,
    tile_tokens: int,
) -> tuple[Array, int]:
    """The lines of a step's tiles, padding and the last one included, and its partial rows."""
    tokens, start, place = (np.array(each, np.int64) for each in (lens, starts, places))
    tiles = cut_tiles(tokens, start, place, np.arange(tokens.size), tile_tokens)
    padding = np.arange(tokens.sum(), num_rows, tile_tokens)
    table = np.zeros((len(tiles) + len(padding) + 1, TILE_FIELDS), np.int32)
    table[: len(tiles), :5] = tiles
    behind = table[len(tiles) :]
    behind[:-1, 0], behind[-1, 0] = padding, num_rows
    behind[:-1, 1] = np.minimum(tile_tokens, num_rows - padding)
    behind[:, 3] = -1
    splits = np.maximum(1, -(-table[:-1, 4] // INVARIANT_SPLIT))
    rows = np.where(splits > 1, table[:-1, 1], 0)
    partials = np.cumsum(rows * splits)
    table[1:, 5] = np.cumsum(splits)
    table[1:, 6] = np.cumsum(rows)
    table[:-1, 7] = np.where(splits > 1, partials - rows * splits, -1)
    table[-1, 7] = -1
    return table, int(partials[-1])
