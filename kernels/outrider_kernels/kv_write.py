"""Writing new keys and values into the paged cache, and rotating the keys before."""

from __future__ import annotations

import torch

from outrider_kernels.elementwise import rotary
from outrider_kernels.kv_rows import round_kv


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
    kv_heads, head_dim]; for the others see `rotary` and `write_kv`. Keys for an int8 cache are
    rounded once.
    """
    wide = queries_keys.float() if k_cache.dtype == torch.int8 else queries_keys
    rotated = rotary(wide, cos, signed_sin)
    num_heads = rotated.shape[1] - values.shape[1]
    write_kv(rotated[:, num_heads:], values, k_cache, v_cache, slots)
    return rotated[:, :num_heads].to(queries_keys.dtype)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put row i of k and v at slots[i] = block * block_size + offset.

    k and v are [num_rows, kv_heads, head_dim] with num_rows >= len(slots); rows after the last slot
    are padding and are not written. An int8 cache gets them as `round_kv` rounds them.
    """
    num_tokens = slots.shape[0]
    for rows, cache in ((k[:num_tokens], k_cache), (v[:num_tokens], v_cache)):
        stored = round_kv(rows) if cache.dtype == torch.int8 else rows
        width = cache.shape[2] * cache.shape[3]
        cache.view(-1, width).index_copy_(0, slots, stored.reshape(num_tokens, width))
