"""Rotates queries and keys, and writes keys and values into the paged cache, in one pass.

References: `rotate_and_write` in outrider_kernels/kv_write.py, bit for bit, and `round_rows` in
kv_scaled.py for a cache in 8 bits. A program has one row and a few of its heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.cache import Cache
from outrider_kernels.triton_ops.configs import HEADS_BLOCK, ROTARY
from outrider_kernels.triton_ops.eight_bits import fp32_to_e4m3, round_to_int8
from outrider_kernels.triton_ops.launch import aligned, launch, type_name


@triton.jit
def _store_rows(
    cache, scales, slot, values, column, is_head, is_column, HEAD_DIM: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """float32 values [heads, columns] as rows of the cache at slot [heads]."""
    to = cache + slot[:, None] * HEAD_DIM + column[None, :]
    inside = is_head[:, None] & is_column[None, :]
    if CACHE == "plain":
        tl.store(to, values.to(cache.dtype.element_ty), mask=inside)
    else:
        LARGEST: tl.constexpr = 127.0 if CACHE == "int8" else 448.0
        spoilt = tl.sum(values * 0.0, 1)  # not zero if one of them is no number
        is_finite = spoilt == 0.0
        values = tl.where(is_finite[:, None], values, 0.0)
        largest = tl.max(tl.abs(values), 1)
        scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
        scale = tl.where(scale > 0.0, scale, 1.0)
        steps = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
        if CACHE == "int8":
            tl.store(to, round_to_int8(steps), mask=inside)
        else:
            tl.store(to, fp32_to_e4m3(steps), mask=inside)
        tl.store(scales + slot, tl.where(is_finite, scale, float("nan")), mask=is_head)


@triton.jit(do_not_specialize=["qk_stride", "v_stride", "num_tokens", "heads", "kv_heads"])
def rotary_write_kernel(
    queries_keys,
    values,
    cos,
    signed_sin,
    slots,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    qk_stride,
    v_stride,
    num_tokens,
    heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Program (row, block of heads): queries, keys, then values; strides in heads of HEAD_DIM."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED_DIM)
    is_column = column < HEAD_DIM
    is_query, is_rotated = head < heads, head < heads + kv_heads
    is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    rotated_here = is_rotated[:, None] & is_column[None, :]

    begin = queries_keys + (row * qk_stride + head[:, None]) * HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    across = tl.where(column < half, column + half, column - half)
    own = tl.load(begin + column[None, :], mask=rotated_here, other=0.0).to(tl.float32)
    other = tl.load(begin + across[None, :], mask=rotated_here, other=0.0).to(tl.float32)
    angle = row * HEAD_DIM + column
    row_cos = tl.load(cos + angle, mask=is_column, other=0.0)
    row_sin = tl.load(signed_sin + angle, mask=is_column, other=0.0)
    rotated = own * row_cos[None, :] + other * row_sin[None, :]
    to = q + (row * heads + head[:, None]) * HEAD_DIM + column[None, :]
    is_in_q = is_query[:, None] & is_column[None, :]
    tl.store(to, rotated.to(q.dtype.element_ty), mask=is_in_q)

    is_token = row < num_tokens
    slot = tl.load(slots + row, mask=is_token, other=-1)
    is_written = is_token & (slot >= 0)
    k_slot = slot * kv_heads + (head - heads)
    is_key = is_rotated & (head >= heads) & is_written
    _store_rows(k_cache, k_scales, k_slot, rotated, column, is_key, is_column, HEAD_DIM, CACHE)
    v_head = head - heads - kv_heads
    is_value = is_value & is_written
    plain = tl.load(
        values + (row * v_stride + v_head[:, None]) * HEAD_DIM + column[None, :],
        mask=is_value[:, None] & is_column[None, :],
        other=0.0,
    ).to(tl.float32)
    _store_rows(
        v_cache, v_scales, slot * kv_heads + v_head, plain, column, is_value, is_column, HEAD_DIM,
        CACHE,
    )  # fmt: skip


def rotate_and_write(
    queries_keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values, return the queries [num_rows, heads, dim].

    As `kv_write.rotate_and_write`; a slot of -1 writes nothing, as rows after the last slot. Keys
    for a cache in 8 bits are rounded once. ValueError for what the tables do not list.
    """
    num_rows, num_rotated, head_dim = queries_keys.shape
    kv_heads = values.shape[1]
    heads = num_rotated - kv_heads
    dtype = type_name(queries_keys, "bf16", "fp16", "fp32")
    cache = Cache.check(queries_keys.dtype, head_dim, k_cache, v_cache, k_scales, v_scales)
    if values.dtype != queries_keys.dtype or k_cache.shape[2:] != values.shape[1:]:
        raise ValueError(f"a cache of {list(k_cache.shape)} does not fit {list(values.shape)}")
    if cos.shape[0] < num_rows or cos.dtype != torch.float32 or signed_sin.shape != cos.shape:
        raise ValueError(f"float32 angles are needed for {num_rows} rows, got {list(cos.shape)}")
    if slots.dtype != torch.int64 or slots.shape[0] > num_rows:
        raise ValueError(f"int64 slots are needed for at most {num_rows} rows")
    queries_keys, values = _in_heads(queries_keys), _in_heads(values)
    q = queries_keys.new_empty((num_rows, heads, head_dim))
    launch(
        rotary_write_kernel,
        (num_rows, triton.cdiv(num_rotated + kv_heads, HEADS_BLOCK)),
        ROTARY[dtype, cache.type, head_dim],
        queries_keys,
        values,
        aligned(cos.contiguous()),
        aligned(signed_sin.contiguous()),
        aligned(slots),
        q,
        cache.keys,
        cache.values,
        cache.k_scales,
        cache.v_scales,
        queries_keys.stride(0) // head_dim,
        values.stride(0) // head_dim,
        slots.shape[0],
        heads,
        kv_heads,
    )
    return q


def _in_heads(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim], or a copy unless heads are dense and rows whole heads apart."""
    head_dim = x.shape[2]
    dense = x.stride(2) == 1 and x.stride(1) == head_dim and x.stride(0) % head_dim == 0
    return aligned(x if dense else x.contiguous())
