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
from outrider_kernels.triton_ops.configs_linear import GROUP, KINDS


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A matrix as the kernels read it; made by `pack`."""

    kind: str
    values: torch.Tensor
    """[out, in] in whole groups, for int8 in whole pairs of groups; int4: bytes [out, in / 2]."""
    scales: torch.Tensor
    """float32 [out] of e4m3, or the words of groups; unused by plain weights."""
    num_in: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scales.nbytes


def pack(weight: torch.Tensor, kind: str = "plain") -> GpuWeight:
    """A matrix [out, in], once; kind is one of KINDS. ValueError for another kind."""
    num_in = weight.shape[1]
    whole = F.pad(weight, (0, -num_in % GROUP)).contiguous()
    if kind == "plain":
        return GpuWeight(kind, whole, whole.new_empty(1, dtype=torch.float32), num_in)
    if kind == "e4m3":
        values, scales = round_rows(whole, torch.float8_e4m3fn)
        return GpuWeight(kind, values.view(torch.uint8), scales, num_in)
    if kind in ("int8", "int8_rows"):
        values, scales = (_in_pairs(part) for part in quantise_weight(weight))
        words = _words(scales[..., 0], scales[..., 1])
        return GpuWeight(kind, values.flatten(1).contiguous(), words, num_in)
    if kind == "int4":
        values, steps, lowest = quantise_nibbles(weight)
        values = _in_pairs(values)
        packed = values[:, :, 0] | values[:, :, 1] << 4
        words = _words(*(_in_pairs(part).flatten(1) for part in (steps, lowest)))
        return GpuWeight(kind, packed.flatten(1).contiguous(), words, num_in)
    raise ValueError(f"no weights of kind {kind!r}, only {', '.join(KINDS)}")


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """[out, groups, ...] as [out, pairs, 2, ...]; a lone last group has a partner of zeros."""
    if x.shape[1] % 2:
        x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
    return x.view(x.shape[0], -1, 2, *x.shape[2:])


def _words(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int32 [n, out] of numbers of 16 bits, [out, n] each."""
    halves = torch.stack([low.t(), high.t()], -1).contiguous()
    return halves.view(torch.int32).squeeze(-1)
