"""Rounding to int8 and int4 in groups of inputs, in plain torch; csrc/linear8.h rounds rows alike.

A group is GROUP inputs next to each other, of one column of a weight or of one row of activations.
In int8 it has one scale: its largest value is 127 steps. Small groups, because a few activations
are huge and would leave all the others of their row a handful of steps.

In int4, of weights alone, a group has its lowest value and a step, and the others are 0 to 15 steps
above it. That is Q4_1 of GGUF files: weights that were once rounded so come out as they were.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
"""Inputs, as csrc/kernels.h has it. 32 against 64 costs 3 % of memory and gains 0.5 % of agreement
with float32 on the best token."""
EITHER = "int8+int4"
"""How to round a matrix: to int4 where that gives every weight back, else to int8."""
_ZERO = 1e-30
"""A group that is nowhere larger counts as zero: its inverse would not be a number."""


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [out, in]: int8 [out, groups, GROUP], padded with zeros, and scales [out, groups].

    Scales are bfloat16: half the memory, and rounded before the values are, so nothing is lost.
    A group that holds NaN or infinity has the scale NaN.
    """
    groups = in_groups(weight.float())
    scales = _rounded_up(groups.abs().amax(-1) / 127.0)
    steps = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    values = (groups * steps[..., None]).round_().clamp_(-127, 127).nan_to_num_(0.0)
    scales[~groups.isfinite().all(-1)] = torch.nan
    return values.to(torch.int8), scales


def quantise_nibbles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of [out, in]: uint8 0 to 15 [out, groups, GROUP], steps and lowest values [out, groups].

    Both are float16, and rounded before the values are. A last group that is not whole is filled up
    with its last value. One that holds NaN, infinity or what float16 cannot hold is NaN.
    """
    padding = -weight.shape[1] % GROUP
    filling = weight[:, -1:].expand(-1, padding)
    groups = in_groups(torch.cat([weight, filling], 1).float())
    least, most = groups.aminmax(dim=-1)
    # Tensor by tensor, as in quantise_rows. Adding zero leaves none with a sign.
    steps = ((most - least) / torch.full_like(least, 15.0)).half()
    lowest = (least + 0.0).half()
    is_number = steps.isfinite() & lowest.isfinite()
    steps = torch.where(is_number, steps, 0.0)
    inverse = torch.where(steps > 0, 1.0 / steps.float(), 0.0)
    values = (groups - lowest.float()[..., None]) * inverse[..., None]
    values = values.round_().clamp_(0, 15).nan_to_num_(0.0)
    return values.to(torch.uint8), steps, torch.where(is_number, lowest, torch.nan)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [rows, in]: whole numbers -127 to 127, float32 [rows, groups, GROUP], and their scales.

    Scales are float32 [rows, groups], NaN where a value is no number.
    """
    groups = in_groups(x.float())
    largest = groups.abs().amax(-1)
    is_zero = ~(largest > _ZERO)
    # Tensor by tensor: torch turns other divisions into products with an inverse, rounded twice.
    steps = torch.full_like(largest, 127.0)
    inverse = torch.where(is_zero, 0.0, steps / largest)
    values = (groups * inverse[..., None]).round_().nan_to_num_(0.0)
    scales = torch.where(is_zero, 0.0, largest / steps) + (groups - groups).sum(-1)
    return values, scales


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """[n, in] as [n, groups, GROUP], the last padded with zeros."""
    padding = -x.shape[1] % GROUP
    padded = F.pad(x, (0, padding)) if padding else x
    return padded.reshape(x.shape[0], padded.shape[1] // GROUP, GROUP)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not smaller, of finite positive float32, so that nothing clips."""
    bits = scales.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16 << 16).view(torch.float32).bfloat16()
