"""Index arithmetic of a captured step, on the device: from a line for each tile to every row.

Reference: `plan_attention` in work.py, whose units and merges of invariant mode come out, and the
runner's positions and slots. The tiles are in frames.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs import SPREAD, SPREAD_BLOCK
from outrider_kernels.triton_ops.launch import launch
from outrider_kernels.triton_ops.work import UNIT_FIELDS


@triton.jit
def _tile_of(tiles, field, place, num_tiles, BLOCK: tl.constexpr):
    """The last tile whose field is no larger than place, as a pointer to its line."""
    number = tl.full([BLOCK], -1, tl.int32)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        first = tl.load(tiles + tile * 8 + field, mask=tile < num_tiles, other=2147483647)
        number += tl.sum((first[None, :] <= place[:, None]).to(tl.int32), 1)
    return tiles + number * 8


@triton.jit(do_not_specialize=["num_rows", "num_units", "num_tiles"])
def spread_kernel(
    tiles,
    blocks,
    ids,
    wanted,
    wide_ids,
    positions,
    slots,
    wide_wanted,
    units,
    merges,
    num_rows,
    num_units,
    num_tiles,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: some rows, as many units, as many merges; of merges there is room for a row each."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_unit = place < num_rows, place < num_units

    tile = _tile_of(tiles, 0, place, num_tiles, BLOCK)
    table = tl.load(tile + 3)
    is_token = is_row & (table >= 0)
    at = tl.where(is_token, tl.load(tile + 2) + place - tl.load(tile), 0)
    page = tl.load(blocks + table + at // PAGE, mask=is_token, other=0).to(tl.int64)
    tl.store(positions + place, at.to(tl.int64), mask=is_row)
    tl.store(slots + place, tl.where(is_token, page * PAGE + at % PAGE, -1), mask=is_row)
    tl.store(wide_ids + place, tl.load(ids + place, mask=is_row).to(tl.int64), mask=is_row)
    tl.store(wide_wanted + place, tl.load(wanted + place, mask=is_row).to(tl.int64), mask=is_row)

    tile = _tile_of(tiles, 5, place, num_tiles, BLOCK)
    tokens, keys, partial = tl.load(tile + 1), tl.load(tile + 4), tl.load(tile + 7)
    split = place - tl.load(tile + 5)
    unit = units + place * 8
    tl.store(unit, tl.load(tile), mask=is_unit)
    tl.store(unit + 1, tokens, mask=is_unit)
    tl.store(unit + 2, tl.load(tile + 2), mask=is_unit)
    tl.store(unit + 3, tl.maximum(tl.load(tile + 3), 0), mask=is_unit)
    tl.store(unit + 4, split * SPLIT, mask=is_unit)
    tl.store(unit + 5, tl.minimum(split * SPLIT + SPLIT, keys), mask=is_unit)
    tl.store(unit + 6, tl.where(partial < 0, -1, partial + split * tokens), mask=is_unit)
    tl.store(unit + 7, place * 0, mask=is_unit)

    tile = _tile_of(tiles, 6, place, num_tiles, BLOCK)
    token = place - tl.load(tile + 6)
    merge = merges + place * 4
    tl.store(merge, tl.load(tile) + token, mask=is_row)
    tl.store(merge + 1, tl.load(tile + 7) + token, mask=is_row)
    tl.store(merge + 2, tl.load(tile + 1), mask=is_row)
    tl.store(merge + 3, (tl.load(tile + 4) + SPLIT - 1) // SPLIT, mask=is_row)


def spread(
    tiles: torch.Tensor,
    blocks: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
    numbers: torch.Tensor,
    units: torch.Tensor,
    merges: torch.Tensor,
) -> None:
    """Fill numbers, int64 [4, num_rows], with ids, positions, slots and wanted rows; and units.

    All others are int32: tiles as in frames.py with num_rows + 1 lines, blocks, ids and wanted
    [num_rows], units and merges as in work.py, with a merge for each row. Slots of padding are -1.
    """
    num_rows, num_units = numbers.shape[1], units.numel() // UNIT_FIELDS
    grid = (triton.cdiv(max(num_rows, num_units), SPREAD_BLOCK),)
    launch(
        spread_kernel,
        grid,
        SPREAD,
        tiles,
        blocks,
        ids,
        wanted,
        *numbers.unbind(0),
        units,
        merges,
        num_rows,
        num_units,
        num_rows + 1,
    )
