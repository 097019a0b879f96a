"""The worst token of a row that top_k and top_p keep: its cut, as scores.py has it.

It is found by counting tokens, or summing masses, up to three keys at a time: two bits of the key a
pass, over the blocks that reach so far. Sums are of whole numbers, so their order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_kernels.triton_ops.mass import masses_of, weights_of
from outrider_kernels.triton_ops.scores import (
    best_found,
    keys_of,
    load_logits,
    score_of_key,
    scores_of,
)
from outrider_kernels.triton_ops.settings import (
    num_ids_of,
    temperature_of,
    top_k_of,
    top_p_of,
)


@triton.jit
def measure(
    logits,
    block_best,
    row,
    best,
    temperature,
    width,
    num_ids,
    blocks,
    first,
    second,
    third,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """How many tokens have keys of at most each of three rising ones, or their mass; int64."""
    a = tl.zeros([BLOCK], tl.int64)
    b = tl.zeros([BLOCK], tl.int64)
    c = tl.zeros([BLOCK], tl.int64)
    for block in range(blocks):
        top = tl.load(block_best + row * blocks + block)
        if keys_of(scores_of(top, best, temperature)) <= third:
            ids, values = load_logits(logits, row, block, width, num_ids, BLOCK, UNIT)
            scores = scores_of(values, best, temperature)
            keys = keys_of(scores)
            size = masses_of(weights_of(scores)) if BY_MASS else (ids < num_ids).to(tl.int64)
            a += tl.where(keys <= first, size, 0)
            b += tl.where(keys <= second, size, 0)
            c += tl.where(keys <= third, size, 0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def lowest_key(
    logits,
    block_best,
    row,
    best,
    temperature,
    width,
    num_ids,
    blocks,
    needed,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The lowest key up to which there is what is needed, and how much there is below it."""
    key = tl.full([], 0, tl.int64)
    unit = tl.full([], 1 << 30, tl.int64)
    below = tl.full([], 0, tl.int64)
    for _ in range(16):
        first = tl.minimum(key + unit - 1, 0x7FFFFFFF).to(tl.int32)
        second = tl.minimum(key + 2 * unit - 1, 0x7FFFFFFF).to(tl.int32)
        third = tl.minimum(key + 3 * unit - 1, 0x7FFFFFFF).to(tl.int32)
        a, b, c = measure(
            logits, block_best, row, best, temperature, width, num_ids, blocks,
            first, second, third, BY_MASS, BLOCK, UNIT,
        )  # fmt: skip
        digit = (a < needed).to(tl.int64) + (b < needed).to(tl.int64) + (c < needed).to(tl.int64)
        below = tl.where(digit == 1, a, tl.where(digit == 2, b, tl.where(digit == 3, c, below)))
        key += digit * unit
        unit = unit >> 2
    return key.to(tl.int32), below


@triton.jit
def id_of_nth(
    logits,
    block_best,
    row,
    best,
    temperature,
    width,
    num_ids,
    blocks,
    key,
    n,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The id of the n-th token, from 1 on, of those with a key; the largest number if n is more."""
    found = tl.full([], 0x7FFFFFFF, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for block in range(blocks):
        top = tl.load(block_best + row * blocks + block)
        if keys_of(scores_of(top, best, temperature)) <= key:
            ids, values = load_logits(logits, row, block, width, num_ids, BLOCK, UNIT)
            keys = keys_of(scores_of(values, best, temperature))
            equal = (keys == key) & (ids < num_ids)
            rank = seen + tl.cumsum(equal.to(tl.int32), 0).to(tl.int64)
            here = tl.min(tl.where(equal & (rank == n), ids, 0x7FFFFFFF), 0)
            found = tl.minimum(found, here)
            seen += tl.sum(equal.to(tl.int32), 0).to(tl.int64)
    return found


@triton.jit(do_not_specialize=["width", "blocks"])
def cut_kernel(
    logits,
    settings,
    block_best,
    block_id,
    row_best,
    cuts,
    width,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program: a row. Its best token, and the worst one that top_k and top_p keep."""
    row = tl.program_id(0)
    of_row = settings + row * 8
    best, best_id = best_found(block_best, block_id, row, blocks, BLOCKS)
    temperature, num_ids = temperature_of(of_row), num_ids_of(of_row)
    top_k, top_p = top_k_of(of_row), top_p_of(of_row)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    key = tl.full([], 0x7FFFFFFF, tl.int32)
    last_id = tl.full([], 0x7FFFFFFF, tl.int32)
    filters = ((top_k > 0) | (top_p < 1.0)) & (temperature > 0.0)
    if filters & (is_bad == 0):
        num_equal = tl.full([], 0, tl.int64)
        if top_k > 0:
            key, better = lowest_key(
                logits, block_best, row, best, temperature, width, num_ids, blocks,
                top_k, False, BLOCK, UNIT,
            )  # fmt: skip
            num_equal = top_k - better
        if top_p < 1.0:
            below, total, _ = measure(
                logits, block_best, row, best, temperature, width, num_ids, blocks,
                key - 1, key, key, True, BLOCK, UNIT,
            )  # fmt: skip
            if top_k > 0:
                total = below + num_equal * masses_of(weights_of(score_of_key(key)))
            allowed = top_p * total.to(tl.float64)
            needed = allowed.to(tl.int64)
            needed = tl.maximum(needed + (needed.to(tl.float64) < allowed).to(tl.int64), 1)
            key, better = lowest_key(
                logits, block_best, row, best, temperature, width, num_ids, blocks,
                needed, True, BLOCK, UNIT,
            )  # fmt: skip
            each = tl.maximum(masses_of(weights_of(score_of_key(key))), 1)
            num_equal = (needed - better + each - 1) // each
        last_id = id_of_nth(
            logits, block_best, row, best, temperature, width, num_ids, blocks,
            key, num_equal, BLOCK, UNIT,
        )  # fmt: skip
    tl.store(row_best + row, best)
    tl.store(cuts + row * 4, tl.where(is_bad, -1, best_id).to(tl.int64))
    tl.store(cuts + row * 4 + 1, key.to(tl.int64))
    tl.store(cuts + row * 4 + 2, last_id.to(tl.int64))
