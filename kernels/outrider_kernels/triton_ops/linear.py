"""Matrix products for few rows, which only wait for weights: bf16 and fp16, e4m3, int8 and int4.

References: `linear` in outrider_kernels/linear.py, on what the weights stand for; their layouts are
in gpu_weight.py. Sums are float32 in one order, from the first input to the last.

Invariant mode has one tile for any number of rows, so a row's bits do not depend on its company.
Without it tiles follow the number of rows, and another tile may be summed in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs_linear import (
    GROUP,
    INVARIANT_ROWS,
    LINEAR,
    ROUND,
    ROUND_GROUPS,
    TILE_ROWS,
    WHOLE_KINDS,
)
from outrider_kernels.triton_ops.eight_bits import (
    E4M3_SHIFT,
    e4m3_to_fp16,
    int8_to_fp16,
    round_to_int8,
)
from outrider_kernels.triton_ops.gpu_weight import GpuWeight
from outrider_kernels.triton_ops.launch import TYPES, aligned, launch, type_name


@triton.jit
def tile_of(num_rows, num_out, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Rows and outputs of a program; programs that share weights follow each other."""
    tiles = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    row = (program % tiles) * ROWS + tl.arange(0, ROWS)
    return row, (program // tiles) * OUTPUTS + tl.arange(0, OUTPUTS)


@triton.jit
def store_tile(sums, bias, out, row, output, num_rows, num_out, has_bias):
    """Add the bias on its own, round once."""
    if has_bias != 0:
        added = tl.load(bias + output, mask=output < num_out, other=0.0)
        sums += added.to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * num_out + output[None, :]
    inside = (row < num_rows)[:, None] & (output < num_out)[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_out", "groups", "has_bias"])
def whole_kernel(
    out,
    x,
    weight,
    scales,
    bias,
    num_rows,
    num_out,
    groups,
    has_bias,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program: a tile of "plain" or "e4m3"; the latter's scales are those of outputs."""
    DOT: tl.constexpr = x.dtype.element_ty
    row, output = tile_of(num_rows, num_out, ROWS, OUTPUTS)
    num_in = groups * 32
    place = tl.arange(0, INPUTS)
    x_begin = row.to(tl.int64)[:, None] * num_in + place[None, :]
    w_begin = output.to(tl.int64)[None, :] * num_in + place[:, None]
    is_row, is_output = (row < num_rows)[:, None], (output < num_out)[None, :]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, num_in, INPUTS):
        inside = first + place < num_in
        part = tl.load(x + x_begin + first, mask=is_row & inside[None, :], other=0.0)
        values = tl.load(weight + w_begin + first, mask=is_output & inside[:, None], other=0)
        if KIND == "e4m3":
            values = e4m3_to_fp16(values)
        sums = tl.dot(part, values.to(DOT), sums, input_precision="ieee")
    if KIND == "e4m3":
        scale = tl.load(scales + output, mask=output < num_out, other=0.0) * E4M3_SHIFT
        sums *= scale[None, :]
    store_tile(sums, bias, out, row, output, num_rows, num_out, has_bias)


@triton.jit
def low_half(word, KIND: tl.constexpr):
    """The number in the low half of an int32, as float32."""
    if KIND == "int4":
        return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(word, KIND: tl.constexpr):
    """The number in the high half of an int32, as float32."""
    if KIND == "int4":
        return ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows", "num_out", "groups", "has_bias"])
def grouped_kernel(
    out,
    x,
    x_scales,
    weight,
    words,
    bias,
    num_rows,
    num_out,
    groups,
    has_bias,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program: a tile of "int8", "int8_rows" or "int4", by pairs of groups of inputs."""
    row, output = tile_of(num_rows, num_out, ROWS, OUTPUTS)
    place = tl.arange(0, 32)
    x_begin = row.to(tl.int64)[:, None] * (groups * 32) + place[None, :]
    pairs = (groups + 1) // 2
    BYTES: tl.constexpr = 32 if KIND == "int4" else 64  # of an output's pair
    w_begin = output.to(tl.int64)[None, :] * (pairs * BYTES) + place[:, None]
    is_row, is_output = row < num_rows, output < num_out
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # Told to the loop, stages are for loads of scales too, which no product takes.
    for pair in tl.range(0, pairs, num_stages=STAGES):
        w_pair = weight + w_begin + pair * BYTES
        bytes_of_pair = tl.load(w_pair, mask=is_output[None, :], other=0)
        if KIND != "int4":
            word = tl.load(words + pair * num_out + output, mask=is_output, other=0)
        for half in tl.static_range(2):
            group = 2 * pair + half
            inside = is_row & (group < groups)
            part = tl.load(x + x_begin + group * 32, mask=inside[:, None], other=0)
            if KIND == "int4":
                word = tl.load(words + group * num_out + output, mask=is_output, other=0)
                nibbles = (bytes_of_pair >> 4) if half else (bytes_of_pair & 15)
                values = nibbles.to(tl.float16).to(x.dtype.element_ty)
                product = tl.dot(part, values, input_precision="ieee")
                total = tl.sum(part.to(tl.float32), 1)
                sums += product * low_half(word, KIND)[None, :]
                sums += total[:, None] * high_half(word, KIND)[None, :]
            else:
                step = high_half(word, KIND) if half else low_half(word, KIND)
                values = bytes_of_pair
                if half:
                    values = tl.load(w_pair + 32, mask=is_output[None, :], other=0)
                if KIND == "int8_rows":
                    of_rows = tl.load(x_scales + row * groups + group, mask=inside, other=0.0)
                    product = tl.dot(part, values).to(tl.float32) * of_rows[:, None]
                else:
                    values = int8_to_fp16(values).to(x.dtype.element_ty)
                    product = tl.dot(part, values, input_precision="ieee")
                sums += product * step[None, :]
    store_tile(sums, bias, out, row, output, num_rows, num_out, has_bias)


@triton.jit(do_not_specialize=["groups"])
def round_kernel(x, values, scales, groups, GROUPS: tl.constexpr):
    """Program (row, some groups): activations as `quantise_rows` rounds them."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = group < groups
    place = (row * groups + group)[:, None] * 32 + tl.arange(0, 32)[None, :]
    wide = tl.load(x + place, mask=inside[:, None], other=0.0).to(tl.float32)
    # No number is larger than NaN, so that is looked for on its own.
    is_number = tl.min((tl.abs(wide) < float("inf")).to(tl.int32), 1) != 0
    largest = tl.max(tl.abs(tl.where(is_number[:, None], wide, 0.0)), 1)
    is_zero = largest <= 1e-30
    divisor = tl.where(is_zero, 1.0, largest)
    inverse = tl.where(is_zero, 0.0, tl.div_rn(divisor * 0.0 + 127.0, divisor))
    rounded = round_to_int8(tl.where(is_number[:, None], wide * inverse[:, None], 0.0))
    scale = tl.where(is_zero, 0.0, tl.div_rn(largest, largest * 0.0 + 127.0))
    tl.store(values + place, rounded, mask=inside[:, None])
    at = scales + row * groups + group
    tl.store(at, tl.where(is_number, scale, float("nan")), mask=inside)


def round_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, in] and float32 scales [rows, in / GROUP] of rows in whole groups.

    The scale of a group with NaN or infinity is NaN.
    """
    num_rows, groups = x.shape[0], x.shape[1] // GROUP
    values = torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty((num_rows, groups), dtype=torch.float32, device=x.device)
    variant = ROUND[type_name(x, *ROUND)]
    grid = (num_rows, triton.cdiv(groups, ROUND_GROUPS))
    launch(round_kernel, grid, variant, x, values, scales, groups)
    return values, scales


def linear(
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = True,
) -> torch.Tensor:
    """x @ weight.T + bias for x [rows, in], in the type of x.

    float32 rows are rounded to the type of a plain weight that is narrower, as logits need it.
    ValueError for inputs that do not fit the weight, and for another type of weights or bias.
    """
    num_rows, num_out = x.shape[0], weight.values.shape[0]
    given = type_name(x, "bf16", "fp16", "fp32")
    if x.shape[1] != weight.num_in:
        raise ValueError(f"x has {x.shape[1]} inputs, the weight {weight.num_in}")
    if bias is not None and bias.shape != (num_out,):
        raise ValueError(f"a bias of {list(bias.shape)} does not fit {num_out} outputs")
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    x_scales = unused = torch.empty(1, dtype=torch.float32, device=x.device)
    if weight.kind == "plain" and weight.values.dtype != x.dtype:
        if x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype}, the weight {weight.values.dtype}")
        x = x.to(weight.values.dtype)
    padding = -weight.num_in % GROUP
    x = aligned(F.pad(x, (0, padding)) if padding else x.contiguous())
    if weight.kind == "int8_rows":
        x, x_scales = round_activations(x)
    rows = INVARIANT_ROWS
    if not invariant and given != "fp32":
        sizes = TILE_ROWS[weight.kind in WHOLE_KINDS]
        rows = next((size for size in sizes if num_rows <= size), sizes[-1])
    variant = LINEAR[weight.kind, TYPES[x.dtype], given, rows]
    grid = (triton.cdiv(num_rows, rows) * triton.cdiv(num_out, dict(variant.constants)["OUTPUTS"]),)
    added = unused if bias is None else aligned(bias.float())
    numbers = (num_rows, num_out, x.shape[1] // GROUP, int(bias is not None))
    packed = (weight.values, weight.scales, added)
    if weight.kind in WHOLE_KINDS:
        launch(whole_kernel, grid, variant, out, x, *packed, *numbers)
    else:
        launch(grouped_kernel, grid, variant, out, x, x_scales, *packed, *numbers)
    return out
