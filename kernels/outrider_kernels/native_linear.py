"""Matrix products in C++: csrc/linear.h, linear8.h. Any number of rows, none feels the others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from outrider_kernels.native_library import Library, LinearJob, PackJob, Weight
from outrider_kernels.quantise import GROUP

STRIP = 32
"""Columns that lie together, as csrc/kernels.h has it."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
"""WeightType there, by what strips are made of."""


@dataclass(frozen=True, slots=True)
class StripWeight:
    """A matrix [in, out] in strips of columns."""

    strips: torch.Tensor
    """[strips, in, STRIP] of float32 or bfloat16; columns that the matrix does not have are zero.
    For int8 [strips, groups, bytes], a group's as WeightGroup in csrc/linear8.h."""
    num_in: int
    num_out: int
    dtype: torch.dtype
    """Of the matrix that was packed, and of what is looked up."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.strips.nbytes


def pack(library: Library, weight: torch.Tensor, *, int8: bool = False) -> StripWeight:
    """From [out, in], as checkpoints hold it; a copy. int8: rounded in groups of inputs."""
    num_out, num_in = weight.shape
    num_strips = -(-num_out // STRIP)
    if int8:
        shape = (num_strips, -(-num_in // GROUP), GROUP * STRIP + 2 * STRIP)
        strips = torch.empty(shape, dtype=torch.uint8)
    else:
        strips = torch.empty((num_strips, num_in, STRIP), dtype=weight.dtype)
    weight = weight.contiguous()
    job = PackJob(
        weight=weight.data_ptr(),
        strips=strips.data_ptr(),
        num_in=num_in,
        num_out=num_out,
        is_bf16=library.is_bf16(weight),
        weight_type=_TYPES[strips.dtype],
    )
    library.pack(ctypes.byref(job))
    return StripWeight(strips, num_in, num_out, weight.dtype)


def lookup(weight: StripWeight, columns: torch.Tensor) -> torch.Tensor:
    """The columns of the matrix, int64 [n], as rows: [n, in] in its dtype."""
    strip, column = columns // STRIP, columns % STRIP
    if weight.strips.dtype != torch.uint8:
        return weight.strips[strip, :, column]
    num_bytes = GROUP * STRIP
    quads = weight.strips[..., :num_bytes].view(*weight.strips.shape[:2], GROUP // 4, STRIP, 4)
    values = quads[strip, :, :, column].to(torch.float32) - 128.0  # [n, groups, GROUP / 4, 4]
    scales = weight.strips[..., num_bytes:].view(torch.bfloat16)[strip, :, column]
    rows = values.flatten(2) * scales.float()[..., None]
    return rows.flatten(1)[:, : weight.num_in].to(weight.dtype)


def native_weight(weight: StripWeight, bias: torch.Tensor | None) -> Weight:
    """As the library takes it: pointers into both, which must outlive it.

    bias is float32 [out]. ValueError for another shape or dtype.
    """
    num_out = weight.num_out
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_out,)):
        raise ValueError(f"a bias of {list(bias.shape)} does not fit {num_out} columns")
    if bias is not None and not bias.is_contiguous():
        raise ValueError("a bias must lie in one piece")
    weight_type = _TYPES.get(weight.strips.dtype)
    if weight_type is None:
        raise ValueError(f"weights must be float32, bfloat16 or int8, not {weight.strips.dtype}")
    return Weight(
        data=weight.strips.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        type=weight_type,
        num_in=weight.num_in,
        num_out=num_out,
    )


def linear(
    library: Library, x: torch.Tensor, weight: StripWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight + bias for x [rows, in], bias float32 [out]; [rows, out] like x.

    Sums are float32, and rounded once at the end. With int8 the rows are rounded to bytes as well,
    each group of inputs by its largest. ValueError for another shape or dtype.
    """
    num_rows, num_out = x.shape[0], weight.num_out
    if x.shape[1] != weight.num_in:
        raise ValueError(f"{x.shape[1]} columns do not fit a weight with {weight.num_in} inputs")
    bias = None if bias is None else bias.contiguous()
    packed = native_weight(weight, bias)
    wide = library.widened(x)
    out = torch.empty((num_rows, num_out))
    job = LinearJob(
        weight=packed,
        x=wide.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        num_threads=torch.get_num_threads(),
    )
    library.linear(library.kernels, ctypes.byref(job))
    return out.to(x.dtype)
