"""Plain torch truth for the paged operations: slow, obvious, what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reference_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Token by token and head by head, in float64; q [num_tokens, heads, head_dim], like out."""
    _, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for query_len, start, table in zip(query_lens, starts, block_tables, strict=True):
        for position in range(start, start + query_len):
            seen = [(table[p // block_size], p % block_size) for p in range(position + 1)]
            for head in range(num_heads):
                kv_head = head // (num_heads // kv_heads)
                keys = torch.stack([k_cache[b, o, kv_head] for b, o in seen]).double()
                values = torch.stack([v_cache[b, o, kv_head] for b, o in seen]).double()
                scores = keys @ q[token, head].double() / head_dim**0.5
                out[token, head] = torch.softmax(scores, 0) @ values
            token += 1
    return out.to(q.dtype)


def reference_write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Row i of k and v at slots[i] = block * block_size + offset; further rows are padding."""
    block_size = k_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[row]
        v_cache[slot // block_size, slot % block_size] = v[row]
