"""Paged attention in C++: the index arithmetic of a step, and a call that has it alone.

What is computed with what is in csrc/attention.cpp. Here it is decided only who computes it: query
tokens are cut into tiles and the keys of a tile's queries into units of work. No bit of a result
depends on that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.native_library import (
    AttentionJob,
    AttentionPlan,
    AttentionShape,
    Library,
    native_cache,
    pointer,
)

SPLIT_KEYS = 256  # as in csrc/kernels.h
PARTIAL_EXTRA = 16
TILE_ROWS = 48
"""(token, head of the group) pairs of a tile; more only for larger groups."""
UNIT_ROWS = 144
"""Rows of a unit that takes several KV heads; more only with a single one."""
UNITS_PER_THREAD = 4


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Everything about a step that is the same in every layer."""

    tiles: NDArray[np.int64]
    """[tiles, 6]: first row, tokens, position, place in blocks, splits, first partial row or -1"""
    units: NDArray[np.int64]  # [units, 5]: tile, its splits from and to, KV heads from and to
    blocks: NDArray[np.int64]  # block tables, one after the other
    num_done: NDArray[np.int64]  # [tiles * kv_heads], zero between layers
    num_partials: int  # rows
    num_tokens: int
    block_size: int

    @property
    def native(self) -> AttentionPlan:
        """As the library takes it: pointers into this one, which must outlive it."""
        return AttentionPlan(
            tiles=pointer(self.tiles),
            units=pointer(self.units),
            blocks=pointer(self.blocks),
            num_done=pointer(self.num_done),
            num_units=len(self.units),
            num_partials=self.num_partials,
            block_size=self.block_size,
        )

    def to(self, device: torch.device) -> NativePlan:
        """Itself: there is no other device than the CPU."""
        return self


def plan_attention(
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_heads: int,
    kv_heads: int,
    num_rows: int,
) -> NativePlan:
    """Index arithmetic of a step: sequence i forwards query_lens[i] tokens from position starts[i].

    num_rows >= sum(query_lens) is the height of q; rows after the tokens become zeros.
    """
    group = num_heads // kv_heads
    size = max(1, TILE_ROWS // group)
    positions, tables, splits = [], [], []  # of the tiles
    blocks: list[int] = []
    for length, start, table in zip(query_lens, starts, block_tables, strict=True):
        end = start + length
        for position in range(start, end, size):
            positions.append(position)
            tables.append(len(blocks))
            splits.append(-(-min(position + size, end) // SPLIT_KEYS))
        blocks += table[: -(-end // block_size)]
    wanted = UNITS_PER_THREAD * torch.get_num_threads()
    layout = _layout(tuple(query_lens), tuple(splits), size, group, kv_heads, wanted)
    tiles = layout.tiles.copy()
    tiles[:, 2] = positions
    tiles[:, 3] = tables
    return NativePlan(
        tiles=tiles,
        units=layout.units,
        blocks=np.array(blocks, dtype=np.int64),
        num_done=np.zeros(len(tiles) * kv_heads, dtype=np.int64),
        num_partials=layout.num_partials,
        num_tokens=sum(query_lens),
        block_size=block_size,
    )


class _Layout(NamedTuple):
    """What steps of equal shape share."""

    tiles: NDArray[np.int64]  # as a plan's, but for positions and places in blocks
    units: NDArray[np.int64]
    num_partials: int


@lru_cache(maxsize=64)
def _layout(
    query_lens: tuple[int, ...],
    splits_of_tiles: tuple[int, ...],
    size: int,
    group: int,
    kv_heads: int,
    wanted: int,
) -> _Layout:
    """The same from one step of a text to the next, until it reaches another split."""
    lens, splits = np.array(query_lens), np.array(splits_of_tiles)
    item, begin = _cut(lens, size)
    tiles = np.zeros((item.size, 6), dtype=np.int64)
    tiles[:, 0] = (np.cumsum(lens) - lens)[item] + begin
    tiles[:, 1] = np.minimum(size, lens[item] - begin)
    tiles[:, 4] = splits
    rows = tiles[:, 1] * group
    units, is_cut = _units(splits, rows, kv_heads, wanted)
    partial_rows = np.where(is_cut, splits * rows * kv_heads, 0)
    tiles[:, 5] = np.where(is_cut, np.cumsum(partial_rows) - partial_rows, -1)
    return _Layout(tiles, units, int(partial_rows.sum()))


def _units(
    splits: NDArray[np.int64], rows: NDArray[np.int64], kv_heads: int, wanted: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """About as many units as wanted, and which tiles have their splits in several of them.

    Heads stay together while splits are enough to share out: they lie together in memory.
    """
    splits_per_unit = max(1, int(splits.sum()) // wanted)
    num_ranges = -(-splits // splits_per_unit)
    parts = -(-wanted // int(num_ranges.sum()))
    heads_per_unit = np.clip(UNIT_ROWS // rows, 1, -(-kv_heads // parts))
    num_head_ranges = -(-kv_heads // heads_per_unit)
    tile, place = _cut(num_ranges * num_head_ranges, 1)
    units = np.empty((tile.size, 5), dtype=np.int64)
    units[:, 0] = tile
    units[:, 1] = place // num_head_ranges[tile] * splits_per_unit
    units[:, 2] = np.minimum(units[:, 1] + splits_per_unit, splits[tile])
    units[:, 3] = place % num_head_ranges[tile] * heads_per_unit[tile]
    units[:, 4] = np.minimum(units[:, 3] + heads_per_unit[tile], kv_heads)
    return units, num_ranges > 1


def _cut(lengths: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut each length into pieces of a size: whose piece each is, and where it begins."""
    num_pieces = -(-lengths // size)
    owner = np.repeat(np.arange(lengths.size), num_pieces)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    return owner, (np.arange(owner.size) - first) * size


def paged_attention(
    library: Library,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: NativePlan,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for q [num_rows, heads, head_dim]; same shape.

    Raises ValueError for tensors that do not lie as the library reads them.
    """
    num_rows, heads, head_dim = q.shape
    shape = AttentionShape(heads=heads, kv_heads=k_cache.shape[2], head_dim=head_dim)
    cache = native_cache(k_cache, v_cache, shape)
    if k_cache.shape[1] != plan.block_size or num_rows < plan.num_tokens:
        raise ValueError(f"a cache of {list(k_cache.shape)} or {num_rows} rows do not fit the plan")
    wide = library.widened(q)
    out = torch.zeros(q.shape)
    width = -(-head_dim // 16) * 16 + PARTIAL_EXTRA
    partials = torch.empty(plan.num_partials * width)
    job = AttentionJob(
        plan=plan.native,
        shape=shape,
        cache=cache,
        q=wide.data_ptr(),
        out=out.data_ptr(),
        partials=partials.data_ptr(),
        q_stride=heads * head_dim,
        num_threads=torch.get_num_threads(),
    )
    library.attention(library.kernels, ctypes.byref(job))
    return out.to(q.dtype)
