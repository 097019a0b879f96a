"""Matrix products whose rows do not feel each other.

A library picks its kernel by the shape of the product, and another kernel sums in another order. So
the number of rows that it ever sees is kept where every row comes out the same, bit for bit. Which
numbers these are depends on the library and the processor; a `RowPlan` says it, and whoever makes
one checks it first.

Weights are [in, out], the transpose of what checkpoints hold: the library reads them faster so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: RowPlan
) -> torch.Tensor:
    """x @ weight + bias for x [rows, in], weight [in, out], bias [out]; [rows, out]."""
    if plan.tile_rows is not None:
        y = _in_tiles(x, weight, plan.tile_rows)
    elif x.shape[0] < plan.min_rows:
        y = _padded(x, weight, plan.min_rows)
    elif x.shape[0] <= plan.max_rows:
        y = torch.mm(x, weight)
    else:
        num_parts = -(-x.shape[0] // plan.max_rows)  # of nearly equal size, so none is too small
        y = torch.cat([torch.mm(part, weight) for part in x.tensor_split(num_parts)])
    # Added on its own: a product that starts from the bias may take another kernel.
    return y if bias is None else y.add_(bias)


def _padded(x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The product with zero rows below x, which are cut off again."""
    padded = F.pad(x, (0, 0, 0, num_rows - x.shape[0]))
    return torch.mm(padded, weight)[: x.shape[0]]


def _in_tiles(x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The product in pieces of exactly num_rows rows."""
    pieces = [_padded(part, weight, num_rows) for part in torch.split(x, num_rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
