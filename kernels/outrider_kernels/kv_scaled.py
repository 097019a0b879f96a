"""Keys and values in 8 bits with one scale for each token and KV head: the layout for GPUs.

    cache   int8 or float8_e4m3fn [num_blocks, block_size, kv_heads, head_dim]
    scales  float32               [num_blocks, block_size, kv_heads]

Scales lie apart, so that every row of the cache begins at a multiple of 16 bytes, which a GPU's
asynchronous copies need; and a scale a row leaves the products over head_dim whole. Plain torch:
the truth for what kernels write.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest value of a row becomes."""


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., head_dim] in 8 bits and their scales [...], each row of its own values alone.

    A row that holds NaN or infinity has the scale NaN and the values zero.
    """
    wide = x.float()
    is_finite = wide.isfinite().all(-1, keepdim=True)
    wide = torch.where(is_finite, wide, 0.0)
    largest = wide.abs().amax(-1, keepdim=True)
    scales = largest / torch.full_like(largest, LARGEST[dtype])
    scales = torch.where(scales > 0, scales, 1.0)
    # The scale of a very small row is rounded itself, and could make its values too large.
    steps = (wide / scales).clamp_(-LARGEST[dtype], LARGEST[dtype])
    values = (steps.round_() if dtype == torch.int8 else steps).to(dtype)
    return values, torch.where(is_finite, scales, torch.nan).squeeze(-1)


def widen_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What rounded rows stand for, float32 [..., head_dim]."""
    return values.float() * scales[..., None]
