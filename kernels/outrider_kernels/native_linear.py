"""Matrix products in C++. Any number of rows, none feels the others.

csrc/linear.h, linear8.h, linear4.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from outrider_kernels.native_library import Library, LinearJob, PackJob, Weight
from outrider_kernels.quantise import EITHER, GROUP

STRIP = 32
"""Columns that lie together, as csrc/kernels.h has it."""
_TYPES = ("float32", "bfloat16", "int8", "int4")
"""WeightType there."""
GROUP_BYTES = {"int8": GROUP + 2, "int4": GROUP // 2 + 4}
"""Of one column's group of inputs: its values, and a scale, or a step and a lowest value."""


@dataclass(frozen=True, slots=True)
class StripWeight:
    """A matrix [in, out] in strips of columns."""

    strips: torch.Tensor
    """[strips, in, STRIP] of float32 or bfloat16; columns that the matrix does not have are zero.
    For int8 and int4 [strips, groups, bytes], as WeightGroup in csrc/linear8.h and NibbleGroup in
    linear4.h."""
    type: str
    """float32, bfloat16, int8 or int4."""
    num_in: int
    num_out: int
    dtype: torch.dtype
    """Of the matrix that was packed, and of what is looked up."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.strips.nbytes


def pack(library: Library, weight: torch.Tensor, *, rounding: str | None = None) -> StripWeight:
    """From [out, in], as checkpoints hold it; a copy.

    rounding: int8 or int4, in groups of inputs, or EITHER; None: the same numbers.
    """
    if rounding != EITHER:
        return _pack(library, weight, rounding)
    try:
        return _pack(library, weight, "int4", only_exact=True)
    except _NotExact:
        return _pack(library, weight, "int8")


class _NotExact(Exception):
    """A weight would not come out of int4 as it was."""


def _pack(
    library: Library, weight: torch.Tensor, rounding: str | None, *, only_exact: bool = False
) -> StripWeight:
    num_out, num_in = weight.shape
    num_strips, num_groups = -(-num_out // STRIP), -(-num_in // GROUP)
    name = rounding or str(weight.dtype).removeprefix("torch.")
    if rounding is None:
        strips = torch.empty((num_strips, num_in, STRIP), dtype=weight.dtype)
    else:
        shape = (num_strips, num_groups, STRIP * GROUP_BYTES[rounding])
        strips = torch.empty(shape, dtype=torch.uint8)
    weight = weight.contiguous()
    job = PackJob(
        weight=weight.data_ptr(),
        strips=strips.data_ptr(),
        num_in=num_in,
        num_out=num_out,
        is_bf16=library.is_bf16(weight),
        weight_type=_TYPES.index(name),
        only_exact=only_exact,
    )
    if not library.pack(ctypes.byref(job)):
        raise _NotExact
    return StripWeight(strips, name, num_in, num_out, weight.dtype)


def lookup(weight: StripWeight, columns: torch.Tensor) -> torch.Tensor:
    """The columns of the matrix, int64 [n], as rows: [n, in] in its dtype."""
    strip, column = columns // STRIP, columns % STRIP
    if weight.strips.dtype != torch.uint8:
        return weight.strips[strip, :, column]
    groups = weight.strips.shape[:2]
    if weight.type == "int8":
        num_bytes = GROUP * STRIP
        quads = weight.strips[..., :num_bytes].view(*groups, GROUP // 4, STRIP, 4)
        values = quads[strip, :, :, column].float() - 128.0  # [n, groups, GROUP / 4, 4]
        scales = weight.strips[..., num_bytes:].view(torch.bfloat16)[strip, :, column]
        rows = values.flatten(2) * scales.float()[..., None]
    else:
        num_bytes = GROUP // 2 * STRIP
        quads = weight.strips[..., :num_bytes].view(*groups, GROUP // 8, STRIP, 4)
        both = quads[strip, :, :, column]  # [n, groups, GROUP / 8, 4]
        values = torch.stack([both & 15, both >> 4], 3).flatten(2).float()
        scales = weight.strips[..., num_bytes:].view(torch.float16).view(*groups, 2, STRIP)
        steps, lowest = scales[strip, :, :, column].float().unbind(2)
        rows = values * steps[..., None] + lowest[..., None]
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
    if weight.type not in _TYPES:
        raise ValueError(f"weights must be float32, bfloat16, int8 or int4, not {weight.type}")
    return Weight(
        data=weight.strips.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        type=_TYPES.index(weight.type),
        num_in=weight.num_in,
        num_out=num_out,
    )


def linear(
    library: Library, x: torch.Tensor, weight: StripWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight + bias for x [rows, in], bias float32 [out]; [rows, out] like x.

    Sums are float32, and rounded once at the end. With int8 and int4 rows are rounded to bytes too,
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
