"""Matrix products in C++: csrc/linear.h. Any number of rows, and no row feels the others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from outrider_kernels.native_library import Library, LinearJob, threads_for

STRIP = 32
"""Columns that lie together, as csrc/kernels.h has it."""
_COST_OF_A_WEIGHT = 6
"""Of bringing one from memory, in multiplications."""


@dataclass(frozen=True, slots=True)
class StripWeight:
    """A matrix [in, out] in strips of columns."""

    strips: torch.Tensor
    """[strips, in, STRIP], float32 or bfloat16; columns that the matrix does not have are zero."""
    num_out: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.strips.nbytes


def pack(weight: torch.Tensor) -> StripWeight:
    """From [out, in], as checkpoints hold it; a copy."""
    num_out, num_in = weight.shape
    num_whole = num_out // STRIP
    strips = weight.new_zeros(-(-num_out // STRIP), num_in, STRIP)
    whole = weight[: num_whole * STRIP].view(num_whole, STRIP, num_in)
    strips[:num_whole] = whole.transpose(1, 2)
    if num_out % STRIP:
        strips[-1, :, : num_out % STRIP] = weight[num_whole * STRIP :].t()
    return StripWeight(strips, num_out)


def lookup(weight: StripWeight, columns: torch.Tensor) -> torch.Tensor:
    """The columns of the matrix, int64 [n], as rows: [n, in]."""
    return weight.strips[columns // STRIP, :, columns % STRIP]


def linear(
    library: Library, x: torch.Tensor, weight: StripWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight + bias for x [rows, in], bias float32 [out]; [rows, out] like x.

    Sums are float32, and rounded once at the end. ValueError for another shape or dtype.
    """
    strips, num_out = weight.strips, weight.num_out
    num_rows, num_in = x.shape
    if num_in != strips.shape[1]:
        raise ValueError(f"{num_in} columns do not fit a weight with {strips.shape[1]} inputs")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_out,)):
        raise ValueError(f"a bias of {list(bias.shape)} does not fit {num_out} columns")
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((num_rows, num_out), dtype=x.dtype)
    job = LinearJob(
        x=x.data_ptr(),
        weight=strips.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        num_in=num_in,
        num_out=num_out,
        num_threads=threads_for(num_in * num_out * max(num_rows, _COST_OF_A_WEIGHT)),
        x_is_bf16=library.is_bf16(x),
        weight_is_bf16=library.is_bf16(strips),
    )
    library.linear(library.kernels, ctypes.byref(job))
    return out
