"""Matrix products whose rows do not feel each other.

A library picks its kernel by the shape of the product, and another kernel sums in another order. So
the number of rows that it ever sees is kept where every row comes out the same, bit for bit. Which
numbers these are depends on the library and the processor; a `RowPlan` says it, and whoever makes
one checks it first.

Every product is a float32 product. Narrower weights are widened on the way, a few columns at a
time, so that the wide copy stays in the processor's cache: half the memory, the sums of float32,
and rows as independent as float32's on any processor.

int8 and int4 weights are widened likewise, with what their groups have, and rows are rounded to
int8 first.

Weights are [in, out], the transpose of what checkpoints hold: the library reads them faster so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider_kernels.quantise import quantise_rows
from outrider_kernels.rounded_weight import RoundedWeight

_WIDENED_VALUES = 1 << 19
"""Values of a weight that are float32 at one time: 2 MiB."""
_COLUMN_STEP = 64
"""Columns are widened in multiples of this, so that each row of the copy is whole cache lines."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How many rows one product may have."""

    min_rows: int = 8
    """Fewer are padded with zeros."""
    max_rows: int = 512
    """More are split."""
    tile_rows: int | None = None
    """If set, every product has exactly this many rows, padded with zeros."""

    def __str__(self) -> str:
        return f"tile{self.tile_rows}" if self.tile_rows else f"rows{self.min_rows}-{self.max_rows}"


Weight = torch.Tensor | RoundedWeight


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[in, out] from [out, in], as checkpoints hold it; a copy."""
    return weight.t().contiguous()


def lookup(weight: Weight, columns: torch.Tensor) -> torch.Tensor:
    """Columns of a weight [in, out] by number, int64 [n], as rows: [n, in]."""
    if isinstance(weight, torch.Tensor):
        return weight.index_select(1, columns).t().contiguous()
    wide = torch.empty(weight.padded_in, columns.shape[0], device=weight.device)
    weight.widen(columns, wide)
    return wide[: weight.num_in].t().to(weight.dtype).contiguous()


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, plan: RowPlan
) -> torch.Tensor:
    """x @ weight + bias for x [rows, in], weight [in, out], bias [out]; [rows, out] like x.

    weight and x may be float32 or narrower; sums and the bias, float32 too, are not narrower.
    """
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1])  # else a whole product of padding
    wide = x.float()
    if isinstance(weight, RoundedWeight):
        values, scales = quantise_rows(wide)
        wide = values.mul_(scales[..., None]).flatten(1)
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32:
        y = _product(wide, weight, plan)
    else:
        y = _widening_product(wide, weight, plan)
    # Added on its own: a product that starts from the bias may take another kernel.
    y = y if bias is None else y.add_(bias)
    return y.to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """x @ weight in float32, in pieces of as many rows as the plan allows."""
    if plan.tile_rows is not None:
        return _in_tiles(x, weight, plan.tile_rows)
    if x.shape[0] < plan.min_rows:
        return _padded(x, weight, plan.min_rows)
    if x.shape[0] <= plan.max_rows:
        return torch.mm(x, weight)
    num_parts = -(-x.shape[0] // plan.max_rows)  # of nearly equal size, so none is too small
    return torch.cat([torch.mm(part, weight) for part in x.tensor_split(num_parts)])


def _widening_product(x: torch.Tensor, weight: Weight, plan: RowPlan) -> torch.Tensor:
    """x @ weight in float32 for a narrower weight, some of its columns at a time."""
    num_in, num_out = x.shape[1], weight.shape[1]
    width = max(1, _WIDENED_VALUES // num_in // _COLUMN_STEP) * _COLUMN_STEP
    y = x.new_empty(x.shape[0], num_out)
    scratch = x.new_empty(num_in * min(width, num_out))
    for begin in range(0, num_out, width):
        end = min(begin + width, num_out)
        widened = scratch[: num_in * (end - begin)].view(num_in, end - begin)
        if isinstance(weight, RoundedWeight):
            weight.widen(slice(begin, end), widened)
        else:
            widened.copy_(weight[:, begin:end])
        y[:, begin:end] = _product(x, widened, plan)
    return y


def _padded(x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The product with zero rows below x, which are cut off again."""
    padded = F.pad(x, (0, 0, 0, num_rows - x.shape[0]))
    return torch.mm(padded, weight)[: x.shape[0]]


def _in_tiles(x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The product in pieces of exactly num_rows rows."""
    pieces = [_padded(part, weight, num_rows) for part in torch.split(x, num_rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
