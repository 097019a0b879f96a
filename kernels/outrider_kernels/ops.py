"""The one place that picks an implementation for each operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from outrider_kernels.attention import AttentionPlan, paged_attention, plan_attention
from outrider_kernels.elementwise import rms_norm, rotary, silu_mul
from outrider_kernels.kv_write import write_kv
from outrider_kernels.linear import RowPlan, linear

KERNELS_VERSION = 1
"""Raised with every change of a single bit of any result; part of the numerics id."""

LinearOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a decoder on one device: float32 sums, results in the inputs' dtype."""

    name: str
    linear: LinearOp
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    plan_attention: Callable[..., AttentionPlan]
    paged_attention: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor
    ]


def select_ops(device: torch.device, row_plan: RowPlan) -> Ops:
    """The operations for a device; ValueError for one that has none.

    CUDA gets the same plain torch as the CPU: right, and far from what the device could do.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no operations for device {device.type!r}, only for 'cpu' and 'cuda'")
    return Ops(
        name=f"{device.type}-torch",
        linear=partial(linear, plan=row_plan),
        rms_norm=rms_norm,
        rotary=rotary,
        silu_mul=silu_mul,
        write_kv=write_kv,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
    )
