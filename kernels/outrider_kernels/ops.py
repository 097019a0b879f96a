"""The one place that picks an implementation for each operation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outrider_kernels import native_attention, native_rows
from outrider_kernels.attention import AttentionPlan, paged_attention, plan_attention
from outrider_kernels.elementwise import rms_norm, silu_mul
from outrider_kernels.kv_write import rotate_and_write
from outrider_kernels.linear import RowPlan, linear
from outrider_kernels.native_attention import NativePlan
from outrider_kernels.native_build import Unavailable
from outrider_kernels.native_library import NATIVE_VERSION, load_library

logger = logging.getLogger(__name__)

KERNELS_VERSION = 1
"""Raised with every change of a single bit of any result; part of the numerics id."""
KERNELS = ("auto", "torch")
"""What may be asked for: the fastest that the machine can have, or plain torch."""

Plan = AttentionPlan | NativePlan
LinearOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a decoder on one device: float32 sums, results in the inputs' dtype."""

    name: str
    """Another one for every implementation whose bits differ; part of the numerics id."""
    linear: LinearOp
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rotate_and_write: Callable[..., torch.Tensor]
    plan_attention: Callable[..., Plan]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """With a plan of this `plan_attention`."""


def select_ops(device: torch.device, row_plan: RowPlan, kernels: str = "auto") -> Ops:
    """The operations for a device; logs which, and why. ValueError for a device that has none.

    kernels is one of KERNELS. CUDA gets the same plain torch as the CPU: right, and far from what
    the device could do.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no operations for device {device.type!r}, only for 'cpu' and 'cuda'")
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be {' or '.join(KERNELS)}, got {kernels!r}")
    if kernels == "torch":
        return _torch_ops(device, row_plan, "as asked for")
    if device.type != "cpu":
        return _torch_ops(device, row_plan, "there are no others for this device")
    try:
        return _native_ops(row_plan)
    except Unavailable as reason:
        return _torch_ops(device, row_plan, str(reason), logging.WARNING)


def _torch_ops(
    device: torch.device, row_plan: RowPlan, reason: str, level: int = logging.INFO
) -> Ops:
    logger.log(level, "operations are plain torch (%s-torch): %s", device.type, reason)
    return Ops(
        name=f"{device.type}-torch",
        linear=partial(linear, plan=row_plan),
        rms_norm=rms_norm,
        silu_mul=silu_mul,
        rotate_and_write=rotate_and_write,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
    )


def _native_ops(row_plan: RowPlan) -> Ops:
    """Those of the CPU, in C++ but for the matrix products."""
    library = load_library()
    name = f"cpu-native{NATIVE_VERSION}-{library.isa}"
    logger.info("operations are compiled C++ (%s), the processor's best", name)
    return Ops(
        name=name,
        linear=partial(linear, plan=row_plan),
        rms_norm=partial(native_rows.rms_norm, library),
        silu_mul=partial(native_rows.silu_mul, library),
        rotate_and_write=partial(native_rows.rotate_and_write, library),
        plan_attention=native_attention.plan_attention,
        paged_attention=partial(native_attention.paged_attention, library),
    )
