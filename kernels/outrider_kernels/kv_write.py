"""Writing new keys and values into the paged cache, and rotating the keys before."""

from __future__ import annotations

import torch

from outrider_kernels.elementwise import rotary


def rotate_and_write(
    queries_keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values, return the queries.

    queries_keys is [num_rows, heads + kv_heads, head_dim], the queries first, values [num_rows,
    kv_heads, head_dim]; for the others see `rotary` and `write_kv`.
    """
    rotated = rotary(queries_keys, cos, signed_sin)
    num_heads = rotated.shape[1] - values.shape[1]
    write_kv(rotated[:, num_heads:], values, k_cache, v_cache, slots)
    return rotated[:, :num_heads]


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
