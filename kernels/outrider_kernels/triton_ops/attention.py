"""Paged attention over one ragged batch: prefill chunks, single tokens and drafts in one kernel.

References: `reference_paged_attention` in outrider_kernels/reference.py and `paged_attention` in
attention.py; for a cache in 8 bits see kv_scaled.py. The cache is [num_blocks, PAGE_SIZE,
kv_heads, head_dim]. Who computes what is in work.py: a program has one unit and one KV head, a
tile's rows are token * group + head of the group, so that one read of a key serves all of them.

Softmax is online and in base 2; sums are float32. Units of a tile with several splits leave partial
results and the logarithm of their sum, which a second kernel merges in the order of positions. A
split that a row does not see weighs exactly zero and changes no bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.cache import Cache
from outrider_kernels.triton_ops.configs import ATTENTION, MERGE
from outrider_kernels.triton_ops.eight_bits import E4M3_SHIFT, e4m3_to_fp16, int8_to_fp16
from outrider_kernels.triton_ops.launch import aligned, launch, type_name
from outrider_kernels.triton_ops.work import Work

LOG2_E = math.log2(math.e)


@triton.jit(do_not_specialize=["group", "kv_heads"])
def attention_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    partials,
    partial_logs,
    units,
    blocks,
    group,
    kv_heads,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Program unit * kv_heads + KV head; CACHE is "plain", "int8" or "e4m3"."""
    DOT: tl.constexpr = q.dtype.element_ty
    kv_head = tl.program_id(0) % kv_heads
    unit = units + (tl.program_id(0) // kv_heads) * 8
    num_tokens = tl.load(unit + 1)
    if num_tokens == 0:
        return
    first_row, position, table = tl.load(unit), tl.load(unit + 2), tl.load(unit + 3)
    begin, end, partial = tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 6)

    row = tl.arange(0, BLOCK_M)
    token, head = row // group, kv_head * group + row % group
    column = tl.arange(0, PADDED_DIM)
    is_row, is_column = token < num_tokens, column < HEAD_DIM
    inside = is_row[:, None] & is_column[None, :]
    q_row = (first_row + token).to(tl.int64) * (group * kv_heads) + head
    query = tl.load(q + q_row[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for tile in range(begin, end, TILE):
        key = tile + tl.arange(0, TILE)
        is_key = key < end
        page = tl.load(blocks + table + key // PAGE, mask=is_key, other=0).to(tl.int64)
        slot = (page * PAGE + key % PAGE) * kv_heads + kv_head
        keys, values = _load_tile(
            k_cache, v_cache, slot, is_key, column, is_column, HEAD_DIM, CACHE
        )
        scores = tl.dot(query, keys.to(DOT), input_precision="ieee") * scale_log2
        if CACHE != "plain":
            k_scale = tl.load(k_scales + slot, mask=is_key, other=0.0)
            v_scale = tl.load(v_scales + slot, mask=is_key, other=0.0)
            if CACHE == "e4m3":
                k_scale, v_scale = k_scale * E4M3_SHIFT, v_scale * E4M3_SHIFT
            scores *= k_scale[None, :]
        is_seen = is_key[None, :] & (key[None, :] <= (position + token)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key yet: infinity minus infinity would be no number.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        if CACHE != "plain":
            weights *= v_scale[None, :]
        product = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
        sums = sums * shrink[:, None] + product
        best = new_best

    if partial < 0:
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        to_out = out + q_row[:, None] * HEAD_DIM + column[None, :]
        tl.store(to_out, result.to(out.dtype.element_ty), mask=inside)
    else:
        p_row = (partial + token).to(tl.int64) * (group * kv_heads) + head
        to_partial = partials + p_row[:, None] * HEAD_DIM + column[None, :]
        _store_partial(to_partial, partial_logs + p_row, sums, total, best, inside, is_row)


@triton.jit
def _load_tile(
    k_cache, v_cache, slot, is_key, column, is_column, HEAD_DIM: tl.constexpr, CACHE: tl.constexpr
):
    """Keys [columns, slots] and values [slots, columns]; what is in 8 bits without its scales."""
    keys = tl.load(
        k_cache + slot[None, :] * HEAD_DIM + column[:, None],
        mask=is_key[None, :] & is_column[:, None],
        other=0,
    )
    values = tl.load(
        v_cache + slot[:, None] * HEAD_DIM + column[None, :],
        mask=is_key[:, None] & is_column[None, :],
        other=0,
    )
    if CACHE == "int8":
        keys, values = int8_to_fp16(keys), int8_to_fp16(values)
    elif CACHE == "e4m3":
        keys, values = e4m3_to_fp16(keys), e4m3_to_fp16(values)
    return keys, values


@triton.jit
def _store_partial(to, to_log, sums, total, best, inside, is_row):
    """What a split leaves for the merge: its mean, and the logarithm of its sum in base 2."""
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(to, sums / divisor[:, None], mask=inside)
    log = tl.where(total == 0.0, float("-inf"), best + tl.log2(divisor))
    tl.store(to_log, log, mask=is_row)


@triton.jit(do_not_specialize=["heads"])
def merge_kernel(
    partials,
    partial_logs,
    out,
    merges,
    heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Program merge * heads + head: the splits of one row in the order of positions."""
    head = tl.program_id(0) % heads
    merge = merges + (tl.program_id(0) // heads) * 4
    splits = tl.load(merge + 3)
    if splits == 0:
        return
    row, first, step = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    column = tl.arange(0, PADDED_DIM)
    is_column = column < HEAD_DIM
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([PADDED_DIM], tl.float32)
    one = tl.arange(0, 1)
    for split in range(splits):
        p_row = (first + split * step).to(tl.int64) * heads + head
        log = tl.load(partial_logs + p_row + one)
        part = tl.load(partials + p_row * HEAD_DIM + column, mask=is_column, other=0.0)
        new_best = tl.maximum(best, log)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(best - base), tl.exp2(log - base)
        total = total * shrink + weight
        sums = sums * shrink + part * weight
        best = new_best
    result = sums / total
    to = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + column
    tl.store(to, result.to(out.dtype.element_ty), mask=is_column)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: Work,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for q [num_rows, heads, head_dim]; same shape and type.

    The cache is of q's type, or in 8 bits with scales as kv_scaled.py has them. ValueError for
    types and head sizes that no table lists, and for a cache that does not lie in one piece.
    """
    _, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    q_type = type_name(q, "bf16", "fp16", "fp32")
    cache = Cache.check(q.dtype, head_dim, k_cache, v_cache, k_scales, v_scales)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} KV heads")
    q = aligned(q.contiguous())
    out = torch.empty_like(q)
    partials = q.new_empty((work.num_partials, heads, head_dim), dtype=torch.float32)
    logs = q.new_empty((work.num_partials, heads), dtype=torch.float32)
    units, merges, blocks = work.parts()
    for (block_m, num_units), part in zip(work.launches, units, strict=True):
        launch(
            attention_kernel,
            (num_units * kv_heads,),
            ATTENTION[q_type, cache.type, head_dim, block_m],
            q,
            cache.keys,
            cache.values,
            cache.k_scales,
            cache.v_scales,
            out,
            partials,
            logs,
            part,
            blocks,
            heads // kv_heads,
            kv_heads,
            head_dim**-0.5 * LOG2_E,
        )
    variant = MERGE[q_type, head_dim]
    grid = (work.num_merges * heads,)
    launch(merge_kernel, grid, variant, partials, logs, out, merges, heads)
    return out
