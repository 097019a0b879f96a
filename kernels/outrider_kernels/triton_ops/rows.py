"""The small operations between the matrix products, one pass over their rows each.

References: `rms_norm`, `add_rms_norm` and `silu_mul` in outrider_kernels/elementwise.py. Arithmetic
is in float32, results are rounded once. A row is reduced in a block of fixed size, so its result
does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs import NORM, NORM_BLOCKS, SILU, SILU_BLOCK, UNALIGNED_BLOCK
from outrider_kernels.triton_ops.launch import aligned, launch, type_name


@triton.jit(do_not_specialize=["stride", "parts", "width"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    stride,
    parts,
    width,
    eps,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Program (row, part); stride of x's rows and width are in units of UNIT values."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width * UNIT
    dense = (row * parts + part) * width * UNIT + column
    values = tl.load(
        x + row * stride * UNIT + part * width * UNIT + column, mask=inside, other=0.0
    ).to(tl.float32)
    if ADDS:
        values += tl.load(residual + dense, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + dense, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean_square = tl.sum(values * values, 0) / (width * UNIT).to(tl.float32)
    scaled = values / tl.sqrt_rn(mean_square + eps)
    scaled *= tl.load(weight + part * width * UNIT + column, mask=inside, other=0.0)
    tl.store(out + dense, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension.

    x is [rows, width], or [rows, parts, width] with rows any distance apart; weight is float32,
    [width] or [parts, width]. ValueError for another shape or type, for rows over 16,384, and for
    rows over 1,024 whose width or distance is no multiple of 8.
    """
    return _norm(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to the residual, in place and rounded, and return the sum's norm; both [rows, width].

    The rest as for `rms_norm`.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype or x.dim() != 2:
        raise ValueError(f"a residual of {list(residual.shape)} does not fit {list(x.shape)}")
    if not residual.is_contiguous() or aligned(residual) is not residual:
        raise ValueError("the residual must lie in one piece, from a multiple of 16 bytes on")
    return _norm(x, residual, weight, eps)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    num_rows, width = x.shape[0], x.shape[-1]
    parts = x.shape[1] if x.dim() == 3 else 1
    dtype = type_name(x, "bf16", "fp16", "fp32")
    if weight.dtype != torch.float32 or weight.numel() != parts * width or x.dim() > 3:
        raise ValueError(f"weights of {list(weight.shape)} do not fit {list(x.shape)}")
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == width)
    x = aligned(x if dense else x.contiguous())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    unit = 8 if width % 8 == 0 and x.stride(0) % 8 == 0 else 1
    limit = NORM_BLOCKS[-1] if unit == 8 else UNALIGNED_BLOCK
    if width > limit:
        raise ValueError(f"rows of {width} values, {unit} by {unit}: at most {limit} are supported")
    block = max(NORM_BLOCKS[0], triton.next_power_of_2(width)) if unit == 8 else UNALIGNED_BLOCK
    variant = NORM[dtype, block, unit, residual is not None]
    launch(
        rms_norm_kernel,
        (num_rows, parts),
        variant,
        x,
        out if residual is None else residual,
        aligned(weight.contiguous()),
        out,
        x.stride(0) // unit,
        parts,
        width // unit,
        eps,
    )
    return out


@triton.jit(do_not_specialize=["width"])
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Program (row, block of columns); width in units of UNIT values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width * UNIT
    begin = gate_up + row * 2 * width * UNIT
    gate = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(begin + width * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width * UNIT + column, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width], the gate first; [rows, width].

    ValueError for a type that is neither bf16, fp16 nor fp32.
    """
    dtype = type_name(gate_up, "bf16", "fp16", "fp32")
    gate_up = aligned(gate_up.contiguous())
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    unit = 8 if width % 8 == 0 else 1
    grid = (num_rows, triton.cdiv(width, SILU_BLOCK))
    launch(silu_mul_kernel, grid, SILU[dtype, unit], gate_up, out, width // unit)
    return out
