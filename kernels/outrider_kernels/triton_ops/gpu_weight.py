"""Matrices as the kernels of linear.py read them.

They stay [out, in], as checkpoints hold them, padded to whole groups of inputs: then copies of 16
bytes run along inputs for every kind.

Groups of inputs come in pairs, and what belongs to them in int32 words of two numbers, because an
asynchronous copy has 4 bytes at least:

    int8    words [pairs, out]: the scales of both groups, bfloat16, the first in the low half
    int4    bytes [out, pairs, GROUP]: the first group in the low nibbles, the second in the high
            ones; words [groups, out]: a group's step and its lowest value, float16
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider_kernels.kv_scaled import round_rows
from outrider_kernels.quantise import quantise_nibbles, quantise_weight
from outrider_kernels.rounded_weight import is_exact_in_int4
from outrider_kernels.triton_ops.configs_linear import GROUP, KINDS
from outrider_kernels.triton_ops.launch import aligned


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A matrix as the kernels read it; made by `pack`."""

    kind: str
    values: torch.Tensor
    """[out, in] in whole groups, for int8 in whole pairs of groups; int4: bytes [out, in / 2]."""
    scales: torch.Tensor
    """float32 [out] of e4m3, or the words of groups; unused by plain weights."""
    num_in: int
    dtype: torch.dtype
    """Of the matrix that was packed, and of what is looked up."""

    @property
    def type(self) -> str:
        """As the engine calls precisions; "e4m3" is not one of those."""
        name = str(self.dtype).removeprefix("torch.")
        return {"plain": name, "int8_rows": "int8"}.get(self.kind, self.kind)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scales.nbytes


def pack(weight: torch.Tensor, kind: str = "plain") -> GpuWeight:
    """A matrix [out, in], once; kind is one of KINDS. ValueError for another kind.

    A plain one is not copied where it can stay as it is.
    """
    num_in, padding = weight.shape[1], -weight.shape[1] % GROUP
    whole = F.pad(weight, (0, padding)) if padding else weight.contiguous()

    def packed(values: torch.Tensor, scales: torch.Tensor) -> GpuWeight:
        return GpuWeight(kind, values, scales, num_in, weight.dtype)

    if kind == "plain":
        return packed(aligned(whole), whole.new_empty(0, dtype=torch.float32))
    if kind == "e4m3":
        values, scales = round_rows(whole, torch.float8_e4m3fn)
        return packed(values.view(torch.uint8), scales)
    if kind in ("int8", "int8_rows"):
        values, scales = (_in_pairs(part) for part in quantise_weight(weight))
        return packed(values.flatten(1).contiguous(), _words(scales[..., 0], scales[..., 1]))
    if kind == "int4":
        values, steps, lowest = quantise_nibbles(weight)
        values = _in_pairs(values)
        nibbles = values[:, :, 0] | values[:, :, 1] << 4
        words = _words(*(_in_pairs(part).flatten(1) for part in (steps, lowest)))
        return packed(nibbles.flatten(1).contiguous(), words)
    raise ValueError(f"no weights of kind {kind!r}, only {', '.join(KINDS)}")


def pack_either(weight: torch.Tensor) -> GpuWeight:
    """A matrix [out, in]: "int4" where that gives every weight back, else "int8_rows"."""
    return pack(weight, "int4" if is_exact_in_int4(weight) else "int8_rows")


def lookup(weight: GpuWeight, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix [out, in] by number, int64 [n]: [n, in] in its dtype.

    ValueError for other kinds than those of tables, "plain" and int8.
    """
    values = weight.values.index_select(0, rows)
    if weight.kind == "plain":
        return values[:, : weight.num_in].contiguous()
    if weight.kind not in ("int8", "int8_rows"):
        raise ValueError(f"nothing can be looked up in weights of kind {weight.kind!r}")
    # Both scales of a pair's word, [pairs, out, 2], as [n, pairs, 2].
    scales = weight.scales.view(torch.bfloat16).view(*weight.scales.shape, 2)
    scales = scales.index_select(1, rows).transpose(0, 1)
    wide = values.view(*scales.shape, GROUP).float() * scales.float()[..., None]
    return wide.flatten(1)[:, : weight.num_in].to(weight.dtype).contiguous()


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """[out, groups, ...] as [out, pairs, 2, ...]; a lone last group has a partner of zeros."""
    if x.shape[1] % 2:
        x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
    return x.view(x.shape[0], -1, 2, *x.shape[2:])


def _words(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int32 [n, out] of numbers of 16 bits, [out, n] each."""
    halves = torch.stack([low.t(), high.t()], -1).contiguous()
    return halves.view(torch.int32).squeeze(-1)
