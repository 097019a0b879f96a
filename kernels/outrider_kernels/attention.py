"""Paged attention in plain torch: one ragged batch, and rows that do not feel each other.

The cache of a layer is [num_blocks, block_size, kv_heads, head_dim] for keys and for values; in
int8 with the scales behind each head's values, see kv_rows.py.
Prefill chunks, single tokens and drafts under verification are the same case: some query tokens of
a sequence at absolute positions, each seeing the keys up to its own.

    tile    ROW_TILE rows: (token, head of the group) pairs of one sequence and one KV head
    chunk   KEY_CHUNK keys at absolute positions [c * KEY_CHUNK, (c + 1) * KEY_CHUNK)

    score and weigh every (tile, chunk) pair: matrix products of one fixed shape, many in one call
    join the chunks of a tile: pairwise, in order of position, up to a power of two of them

A row's result is a function of its query and of the keys it sees: each product has the same shape
whatever shares the step, hidden keys weigh exactly zero, and adding the zeros of further chunks
changes nothing. All index arithmetic happens once a step, in `plan_attention`.

Queries and cache may be narrower than float32; they are widened after they are gathered, and only
the result is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.kv_rows import widen_kv

ROW_TILE = 16
KEY_CHUNK = 128
_MAX_PRODUCTS = 128
"""Of a tile, a chunk and a KV head, in one call: bounds its memory, unless a single tile sees more.
"""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles that see the same number of chunks, a power of two."""

    shape: tuple[int, int, int, int]
    """tiles, KV heads, chunks, rows of a tile"""
    query_rows: torch.Tensor  # int64 [tiles * kv_heads * chunks * rows], rows of q's (token, head)
    key_rows: (
        torch.Tensor
    )  # int64 [tiles * kv_heads * chunks * KEY_CHUNK], the cache's (slot, head)
    mask: torch.Tensor  # float32 [tiles, 1, chunks, rows, KEY_CHUNK], 0 or -inf

    def to(self, device: torch.device) -> TileGroup:
        """The same on a device."""
        return TileGroup(
            self.shape,
            self.query_rows.to(device),
            self.key_rows.to(device),
            self.mask.to(device),
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything about a step that is the same in every layer."""

    groups: list[TileGroup]
    out_rows: torch.Tensor
    """int64 [num_rows * heads]: where the groups' outputs hold each (token, head)."""

    def to(self, device: torch.device) -> AttentionPlan:
        """The same on a device."""
        return AttentionPlan([group.to(device) for group in self.groups], self.out_rows.to(device))


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for q [num_rows, heads, head_dim]; same shape."""
    head_dim = q.shape[-1]
    queries = (q.float() * head_dim**-0.5).view(-1, head_dim)
    k_rows, v_rows = (cache.view(-1, cache.shape[3]) for cache in (k_cache, v_cache))
    outs = [_attend(queries, k_rows, v_rows, group) for group in plan.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.index_select(0, plan.out_rows).view_as(q).to(q.dtype)


def _attend(
    queries: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, group: TileGroup
) -> torch.Tensor:
    """One group's output, [tiles * kv_heads * rows, head_dim]."""
    num_tiles, kv_heads, num_chunks, num_rows = group.shape
    head_dim = queries.shape[1]
    tile_queries = queries.index_select(0, group.query_rows).view(-1, num_rows, head_dim)
    keys = _gather(k_rows, group.key_rows, head_dim).view(-1, KEY_CHUNK, head_dim)
    values = _gather(v_rows, group.key_rows, head_dim).view(-1, KEY_CHUNK, head_dim)

    scores = torch.bmm(tile_queries, keys.transpose(1, 2))
    scores = scores.view(num_tiles, kv_heads, num_chunks, num_rows, KEY_CHUNK).add_(group.mask)
    best = scores.amax(-1, keepdim=True)
    if num_chunks > 1:
        best = best.amax(2, keepdim=True)
    weights = scores.sub_(best).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.view(-1, num_rows, KEY_CHUNK), values)
    out = out.view(num_tiles, kv_heads, num_chunks, num_rows, head_dim)
    while out.shape[2] > 1:
        out = out[:, :, 0::2] + out[:, :, 1::2]
        total = total[:, :, 0::2] + total[:, :, 1::2]
    return (out / total).view(-1, head_dim)


def _gather(rows: torch.Tensor, indices: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of the cache as float32 [indices, head_dim]."""
    gathered = rows.index_select(0, indices)
    return widen_kv(gathered, head_dim) if rows.dtype == torch.int8 else gathered.float()


def plan_attention(
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_heads: int,
    kv_heads: int,
    num_rows: int,
) -> AttentionPlan:
    """Index arithmetic of a step: sequence i forwards query_lens[i] tokens from position starts[i].

    num_rows >= sum(query_lens) is the height of q; rows after the tokens get any finite output.
    """
    tiles = _Tiles.cut(query_lens, starts, num_heads // kv_heads)
    slots = [
        _slots_by_position(table, start + length, block_size)
        for table, start, length in zip(block_tables, starts, query_lens, strict=True)
    ]
    out_rows = np.zeros((num_rows, num_heads), dtype=np.int64)
    groups: list[TileGroup] = []
    num_done = 0  # output rows of the groups so far
    for num_chunks, members in tiles.by_num_chunks(kv_heads):
        part = tiles.take(members)
        key_slots = np.stack([slots[i][: num_chunks * KEY_CHUNK] for i in part.item])
        groups.append(_make_group(part, key_slots, num_chunks, num_heads, kv_heads))
        num_done += _place_outputs(out_rows, part, num_heads, kv_heads, num_done)
    return AttentionPlan(groups, torch.from_numpy(out_rows.reshape(-1)))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Per tile: its sequence, and per row its token, position and head of the group."""

    item: NDArray[np.int64]  # [tiles]
    token: NDArray[np.int64]  # [tiles, rows], index into the step's flat tokens
    position: NDArray[np.int64]  # [tiles, rows], absolute
    valid: NDArray[np.bool_]  # [tiles, rows], False for rows that only fill the tile
    head: NDArray[np.int64]  # [rows]

    @staticmethod
    def cut(query_lens: Sequence[int], starts: Sequence[int], group_size: int) -> _Tiles:
        """Cut each sequence's query tokens into tiles, from its first one on."""
        num_rows = -(-group_size // ROW_TILE) * ROW_TILE
        tokens_per_tile = num_rows // group_size
        lens = np.array(query_lens, dtype=np.int64)
        num_tiles = -(-lens // tokens_per_tile)
        item = np.repeat(np.arange(lens.size), num_tiles)
        tile_in_item = np.arange(item.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        row = np.arange(num_rows)
        wanted = tile_in_item[:, None] * tokens_per_tile + row // group_size
        valid = (wanted < lens[item][:, None]) & (row < tokens_per_tile * group_size)
        # Rows that only fill the tile repeat its first token: finite, and never read.
        token = np.where(valid, wanted, wanted[:, :1])
        first = (np.cumsum(lens) - lens)[item][:, None]
        start = np.array(starts, dtype=np.int64)[item][:, None]
        return _Tiles(item, first + token, start + token, valid, row % group_size)

    def by_num_chunks(self, kv_heads: int) -> list[tuple[int, NDArray[np.int64]]]:
        """(chunks rounded up to a power of two, the tiles that see them), in bounded portions."""
        last_chunk = self.position.max(axis=1) // KEY_CHUNK
        exponent = np.frexp(last_chunk.astype(np.float64))[1]  # 2**exponent > last_chunk
        portions = []
        for e in np.unique(exponent):
            members = np.flatnonzero(exponent == e)
            size = max(1, _MAX_PRODUCTS // (kv_heads << int(e)))
            for begin in range(0, members.size, size):
                portions.append((1 << int(e), members[begin : begin + size]))
        return portions

    def take(self, members: NDArray[np.int64]) -> _Tiles:
        """Only these tiles."""
        return _Tiles(
            self.item[members],
            self.token[members],
            self.position[members],
            self.valid[members],
            self.head,
        )


def _slots_by_position(
    block_table: Sequence[int], num_keys: int, block_size: int
) -> NDArray[np.int64]:
    """Cache slot of each absolute position, filled up to a power of two of chunks.

    The filling repeats position 0: a hidden key weighs zero, and zero times what an unused slot
    holds would not be zero if that were NaN.
    """
    num_chunks = 1 << max(0, (-(-num_keys // KEY_CHUNK) - 1).bit_length())
    blocks = np.array(block_table[: -(-num_keys // block_size)], dtype=np.int64)
    used = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_keys]
    slots = np.full(num_chunks * KEY_CHUNK, used[0], dtype=np.int64)
    slots[:num_keys] = used
    return slots


def _make_group(
    tiles: _Tiles, key_slots: NDArray[np.int64], num_chunks: int, num_heads: int, kv_heads: int
) -> TileGroup:
    """Indices and mask of tiles with equally many chunks; key_slots [tiles, chunks * KEY_CHUNK]."""
    num_tiles, num_rows = tiles.token.shape
    heads = np.arange(kv_heads)[None, :, None, None]
    query_rows = tiles.token[:, None, None, :] * num_heads + heads * (num_heads // kv_heads)
    query_rows = np.broadcast_to(
        query_rows + tiles.head, (num_tiles, kv_heads, num_chunks, num_rows)
    )
    key_rows = key_slots.reshape(num_tiles, 1, num_chunks, KEY_CHUNK) * kv_heads + heads
    key_position = np.arange(num_chunks * KEY_CHUNK).reshape(num_chunks, 1, KEY_CHUNK)
    hidden = key_position > tiles.position[:, None, None, :, None]
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
    return TileGroup(
        (num_tiles, kv_heads, num_chunks, num_rows),
        torch.from_numpy(query_rows.flatten()),
        torch.from_numpy(key_rows.flatten()),
        torch.from_numpy(mask),
    )


def _place_outputs(
    out_rows: NDArray[np.int64], tiles: _Tiles, num_heads: int, kv_heads: int, num_done: int
) -> int:
    """Note where each (token, head) of these tiles comes out; returns the rows of output."""
    num_tiles, num_rows = tiles.token.shape
    tile, row = np.nonzero(tiles.valid)
    group_size = num_heads // kv_heads
    for kv_head in range(kv_heads):
        head = kv_head * group_size + tiles.head[row]
        place = num_done + (tile * kv_heads + kv_head) * num_rows + row
        out_rows[tiles.token[tile, row], head] = place
    return int(num_tiles * kv_heads * num_rows)
