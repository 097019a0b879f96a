"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put row i of k and v at slots[i] = block * block_size + offset.

    k and v are [num_rows, kv_heads, head_dim] with num_rows >= len(slots); rows after the last slot
    are padding and are not written.
    """
    num_tokens = slots.shape[0]
    width = k.shape[1] * k.shape[2]
    k_cache.view(-1, width).index_copy_(0, slots, k[:num_tokens].reshape(num_tokens, width))
    v_cache.view(-1, width).index_copy_(0, slots, v[:num_tokens].reshape(num_tokens, width))
