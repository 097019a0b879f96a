"""What attention's programs do in a step, decided on the host and copied to the device once.

Query tokens are cut into tiles of some rows, (token, head of the group) pairs of one sequence and
one KV head, and the keys of a tile into splits at absolute positions [s * split, (s + 1) * split).

    unit    one tile and one split, for all KV heads:
            first row, tokens, position of the first, place in blocks, keys from, keys to,
            first partial row or -1 for a tile with a single split, 0
    merge   one row of a tile with several splits: row, first partial row, step to the next, splits
    blocks  block tables, one after the other

Without `invariant`, tiles and splits follow the shape of the batch: all of the chip has work. With
it they follow a sequence's own positions: no bit of a row's result depends on its company, on how a
prompt was chunked, or on how many drafts follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.triton_ops.configs import (
    BLOCK_ROWS,
    INVARIANT_SPLIT,
    KEY_TILE,
    PAGE_SIZE,
)
from outrider_kernels.triton_ops.launch import send

INVARIANT_TOKENS = 8
"""Tokens that a tile of invariant mode should hold: a usual round of verification."""
MIN_SPLIT = 256
PROGRAMS_PER_PROCESSOR = 2
"""Of a GPU's multiprocessors: what hides the latency of memory."""
ROUND_ROWS = MAX_GROUP = 64
"""Rows of the largest tile for rounds of verification, and so the heads that may share a KV head;
larger tiles are for the chunks of prompts."""
UNIT_FIELDS, MERGE_FIELDS = 8, 4

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Work:
    """Everything about a step that is the same in every layer, in one piece of memory."""

    buffer: torch.Tensor
    """int32: units of each launch, merges, blocks, each from a multiple of 16 bytes on."""
    launches: tuple[tuple[int, int], ...]
    """(rows of a tile, units) of each launch, in order."""
    num_merges: int
    num_blocks: int
    num_partials: int

    def to(self, device: torch.device) -> Work:
        """The same on a device, in one copy."""
        return replace(self, buffer=send(self.buffer, device))

    def parts(self) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Views: units of each launch, merges, blocks."""
        sizes = [units * UNIT_FIELDS for _, units in self.launches]
        sizes.append(self.num_merges * MERGE_FIELDS)
        units = list(self.buffer.split([*sizes, self.buffer.numel() - sum(sizes)]))
        blocks, merges = units.pop(), units.pop()
        return units, merges, blocks


def plan_attention(
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_heads: int,
    kv_heads: int,
    num_rows: int,
    invariant: bool = True,
    num_processors: int = 132,
    max_tile: int = BLOCK_ROWS[-1],
) -> Work:
    """Index arithmetic of a step: sequence i forwards query_lens[i] tokens from position starts[i].

    num_rows >= sum(query_lens) is the height of q; rows after the tokens become zeros. max_tile is
    the largest tile that the tables have for q's type: 32 for float32, else 128. ValueError for a
    block size other than PAGE_SIZE, and for more heads on a KV head than MAX_GROUP or max_tile.
    """
    group = num_heads // kv_heads
    if block_size != PAGE_SIZE:
        raise ValueError(f"blocks of {block_size} tokens, the kernels have {PAGE_SIZE}")
    if group > min(MAX_GROUP, max_tile):
        limit = min(MAX_GROUP, max_tile)
        raise ValueError(f"{group} heads share a KV head, at most {limit} are supported")
    lens, start = np.array(query_lens, dtype=np.int64), np.array(starts, dtype=np.int64)
    used = -(-(start + lens) // block_size)
    tables = [np.asarray(t[:n], np.int32) for t, n in zip(block_tables, used, strict=True)]
    blocks = np.concatenate(tables) if tables else np.empty(0, np.int32)
    places = np.cumsum(used) - used

    parts: list[tuple[int, Array]] = []
    merges: list[Array] = []
    num_partials = 0
    shares = _shares(lens, group, invariant, max_tile)
    for block_rows, members in shares:
        tiles = cut_tiles(lens, start, places, members, block_rows // group)
        split = INVARIANT_SPLIT if invariant else _split_for(tiles, kv_heads, num_processors)
        units, merge, num_partials = _split(tiles, split, num_partials)
        parts.append((block_rows, units))
        merges.append(merge)
    padding = _padding(int(lens.sum()), num_rows, shares[0][0] // group)
    parts[0] = (parts[0][0], np.concatenate([parts[0][1], padding]))
    merged = np.concatenate(merges)
    flat = np.concatenate([*(units.reshape(-1) for _, units in parts), merged.reshape(-1), blocks])
    return Work(
        torch.from_numpy(flat),
        tuple((rows, len(units)) for rows, units in parts),
        len(merged),
        len(blocks),
        num_partials,
    )


def _shares(
    lens: NDArray[np.int64], group: int, invariant: bool, max_tile: int
) -> list[tuple[int, NDArray[np.int64]]]:
    """(rows of a tile, sequences) of each launch: long chunks apart from the few rows of others."""
    everything = np.flatnonzero(lens)
    if invariant:
        return [(invariant_tile(group, max_tile), everything)]
    tokens = int(lens.max(initial=1))
    limit = min(max_tile, ROUND_ROWS)
    if tokens * group <= limit or max_tile == limit:
        return [(_rows_for(tokens * group, group, limit), everything)]
    is_long = lens * group > limit
    short = np.flatnonzero(~is_long & (lens > 0))
    shares = [(max_tile, np.flatnonzero(is_long))]
    if short.size:
        shares.append((_rows_for(int(lens[short].max()) * group, group, limit), short))
    return shares


def invariant_tile(group: int, max_tile: int) -> int:
    """Rows of a tile in invariant mode; it holds that many // group tokens."""
    return _rows_for(INVARIANT_TOKENS * group, group, min(max_tile, ROUND_ROWS))


def _rows_for(wanted: int, group: int, limit: int) -> int:
    """The smallest tile that holds the wanted rows, or the largest up to the limit."""
    allowed = [rows for rows in BLOCK_ROWS if group <= rows <= limit]
    return next((rows for rows in allowed if rows >= wanted), allowed[-1])


def cut_tiles(
    lens: NDArray[np.int64],
    start: NDArray[np.int64],
    places: NDArray[np.int64],
    members: NDArray[np.int64],
    tokens: int,
) -> NDArray[np.int64]:
    """Tiles of some sequences, [tiles, 5]: first row, tokens, position, place in blocks, keys."""
    num_tiles = -(-lens[members] // tokens)
    item = np.repeat(members, num_tiles)
    begin = (np.arange(item.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens
    num_tokens = np.minimum(tokens, lens[item] - begin)
    position = start[item] + begin
    first_row = (np.cumsum(lens) - lens)[item] + begin
    return np.stack([first_row, num_tokens, position, places[item], position + num_tokens], 1)


def _split_for(tiles: NDArray[np.int64], kv_heads: int, num_processors: int) -> int:
    """Keys of a split, so that there are about as many programs as the chip runs at once."""
    programs = PROGRAMS_PER_PROCESSOR * num_processors
    share = -(-int(tiles[:, 4].sum()) * kv_heads // programs)
    return max(MIN_SPLIT, -(-share // KEY_TILE) * KEY_TILE)


def _split(tiles: NDArray[np.int64], split: int, num_partials: int) -> tuple[Array, Array, int]:
    """Units and merges of tiles, and the partial rows so far with theirs."""
    splits = -(-tiles[:, 4] // split)
    partial_rows = np.where(splits > 1, splits * tiles[:, 1], 0)
    first = num_partials + np.cumsum(partial_rows) - partial_rows
    owner = np.repeat(np.arange(len(tiles)), splits)
    number = np.arange(owner.size) - np.repeat(np.cumsum(splits) - splits, splits)
    units = np.zeros((owner.size, UNIT_FIELDS), dtype=np.int32)
    units[:, :4] = tiles[owner, :4]
    units[:, 4] = number * split
    units[:, 5] = np.minimum(units[:, 4] + split, tiles[owner, 4])
    units[:, 6] = np.where(splits > 1, first, -1)[owner]
    units[:, 6] += np.where(splits > 1, tiles[:, 1], 0)[owner] * number

    tile = np.repeat(np.arange(len(tiles)), np.where(splits > 1, tiles[:, 1], 0))
    token = np.arange(tile.size) - np.searchsorted(tile, tile)
    merges = np.zeros((tile.size, MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = tiles[tile, 0] + token
    merges[:, 1] = first[tile] + token
    merges[:, 2] = tiles[tile, 1]
    merges[:, 3] = splits[tile]
    return units, merges, num_partials + int(partial_rows.sum())


def _padding(num_tokens: int, num_rows: int, tokens: int) -> Array:
    """Units without keys for the rows after the tokens: they become zeros."""
    first = np.arange(num_tokens, num_rows, tokens)
    units = np.zeros((first.size, UNIT_FIELDS), dtype=np.int32)
    units[:, 0] = first
    units[:, 1] = np.minimum(tokens, num_rows - first)
    units[:, 6] = -1
    return units
