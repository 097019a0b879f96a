"""Keys and values of the cache rounded to int8, in plain torch; csrc/cache_rows.h does the same.

A row is what the cache holds of one token and KV head: head_dim bytes, and behind them the scales
of each KV_GROUP of them in bfloat16. It lies in one piece, and is made once, of its own values
alone: whoever shares a block, a step or a prefix, its bytes are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider_kernels.kv_layout import KV_GROUP, int8_row_bytes, num_groups

_ZERO = 1e-30
"""A group that is nowhere larger counts as zero: its inverse would not be a number."""


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of the cache, of dtype, for one token and KV head; head_dim is even."""
    return int8_row_bytes(head_dim) if dtype == torch.int8 else head_dim


def round_kv(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., head_dim] as int8 [..., kv_row_size].

    Scales are rounded up before the values are, so that nothing is lost by their bfloat16. A group
    that holds NaN or infinity has the scale NaN.
    """
    head_dim = x.shape[-1]
    groups = _in_groups(x.float())
    largest = groups.abs().amax(-1)
    # A tensor: torch may turn a division by a number into a product with its inverse.
    scales = (largest / torch.full_like(largest, 127.0)).nan_to_num_(0.0, 0.0)
    bits = torch.where(largest > _ZERO, scales, 0.0).view(torch.int32)
    scales = ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)
    steps = torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0)
    values = (groups * steps[..., None]).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    scales[~groups.isfinite().all(-1)] = torch.nan
    values = values.flatten(-2)[..., :head_dim]
    return torch.cat([values, scales.bfloat16().view(torch.int8)], -1)


def widen_kv(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """What int8 rows [..., kv_row_size] stand for: float32 [..., head_dim], exactly."""
    scales = rows[..., head_dim:].contiguous().view(torch.bfloat16).float()
    groups = _in_groups(rows[..., :head_dim].float())
    return (groups * scales[..., None]).flatten(-2)[..., :head_dim]


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] as [..., groups, KV_GROUP], the last padded with zeros."""
    groups = num_groups(x.shape[-1])
    padded = F.pad(x, (0, groups * KV_GROUP - x.shape[-1]))
    return padded.view(*x.shape[:-1], groups, KV_GROUP)
