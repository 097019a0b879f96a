"""A row of logits as scores, read a block at a time; and which of its tokens the filters keep.

A score is (logit - best) / temperature, at most 0, rounded as in the engine. A token's key is the
bits of -score: keys rise as tokens get worse, equal scores have equal keys, and among those a lower
id is better. So what top_k and top_p keep is all up to one (key, id), the row's cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_kernels.triton_ops.mass import weights_of


@triton.jit
def load_logits(logits, row, block, width, num_ids, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Ids of a block and their logits, -inf for those that are none; width in units of UNIT."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    begin = logits + row.to(tl.int64) * width * UNIT
    # The first mask is whole units, so that loads are wide; what lies between may be no number.
    values = tl.load(begin + ids, mask=ids < width * UNIT, other=float("-inf"))
    return ids, tl.where(ids < num_ids, values, float("-inf"))


@triton.jit
def scores_of(logits, best, temperature):
    """At most 0."""
    return tl.div_rn(logits - best, temperature)


@triton.jit
def keys_of(scores):
    """int32, at least 0."""
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def score_of_key(key):
    """The score that has an int32 key."""
    return -(key.to(tl.float32, bitcast=True))


@triton.jit
def is_kept(ids, scores, weights, cut_key, cut_id, min_p):
    """Whether filters keep a token."""
    keys = keys_of(scores)
    return ((keys < cut_key) | ((keys == cut_key) & (ids <= cut_id))) & (weights >= min_p)


@triton.jit
def best_of(values, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, 0x7FFFFFFF), 0)


@triton.jit
def best_found(values, ids, row, blocks, BLOCKS: tl.constexpr):
    """The same of what the blocks of a row have found."""
    block = tl.arange(0, BLOCKS)
    place = row * blocks + block
    found = tl.load(values + place, mask=block < blocks, other=float("-inf"))
    return best_of(found, tl.load(ids + place, mask=block < blocks, other=0x7FFFFFFF))


@triton.jit
def weight_kept(token, logit, best, temperature, cut_key, cut_id, min_p):
    """The weight of one token, 0 if filters leave it out."""
    score = scores_of(logit, best, temperature)
    weight = weights_of(score)
    return tl.where(is_kept(token, score, weight, cut_key, cut_id, min_p), weight, 0.0)
