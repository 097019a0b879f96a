"""What decides whether operations are there for a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and types of a decoder's steps."""

    dtype: torch.dtype
    """Of activations."""
    kv_dtype: torch.dtype
    """Of keys and values in the cache."""
    hidden_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
