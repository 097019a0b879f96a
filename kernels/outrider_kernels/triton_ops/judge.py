"""Whether a draft stands in rejection mode: one row of logits, by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_kernels.noise import Stream
from outrider_kernels.triton_ops.mass import MASS_OF_ONE, masses_of, weights_of
from outrider_kernels.triton_ops.noise import uniform_of, words_of
from outrider_kernels.triton_ops.scores import is_kept, load_logits, scores_of, weight_kept
from outrider_kernels.triton_ops.settings import (
    min_p_of,
    num_ids_of,
    position_of,
    seed_of,
    temperature_of,
)

ACCEPT: tl.constexpr = tl.constexpr(int(Stream.ACCEPT))


@triton.jit(do_not_specialize=["width", "blocks"])
def judge_kernel(
    logits,
    settings,
    row_best,
    cuts,
    drafts,
    draft_ids,
    draft_probs,
    stands,
    width,
    blocks,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program: a row. Whether its draft stands; 0 where there is none or the row is bad."""
    row = tl.program_id(0)
    of_row = settings + row * 8
    draft, best_id = tl.load(drafts + row).to(tl.int32), tl.load(cuts + row * 4).to(tl.int32)
    temperature, best, num_ids = temperature_of(of_row), tl.load(row_best + row), num_ids_of(of_row)
    stand = (draft == best_id) & (draft >= 0)  # all that there is to it at temperature 0
    if (draft >= 0) & (best_id >= 0) & (temperature > 0.0):
        cut_key = tl.load(cuts + row * 4 + 1).to(tl.int32)
        cut_id = tl.load(cuts + row * 4 + 2).to(tl.int32)
        min_p = min_p_of(of_row)
        masses = tl.zeros([BLOCK], tl.int64)
        for block in range(blocks):
            ids, values = load_logits(logits, row, block, width, num_ids, BLOCK, UNIT)
            scores = scores_of(values, best, temperature)
            weights = weights_of(scores)
            kept = is_kept(ids, scores, weights, cut_key, cut_id, min_p)
            masses += tl.where(kept, masses_of(weights), 0)
        mass = tl.sum(masses, 0)
        tl.store(cuts + row * 4 + 3, mass)
        is_token = draft < num_ids
        at = logits + row.to(tl.int64) * width * UNIT + draft
        logit = tl.load(at, mask=is_token, other=float("-inf"))
        weight = weight_kept(draft, logit, best, temperature, cut_key, cut_id, min_p)
        target_prob = weight.to(tl.float64) * MASS_OF_ONE / mass.to(tl.float64)
        entry = row.to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
        probs = tl.load(draft_probs + entry).to(tl.float64)
        mine = tl.sum(tl.where(tl.load(draft_ids + entry) == draft, probs, 0.0), 0)
        draft_prob = mine / tl.sum(probs, 0)
        four = uniform_of(words_of(seed_of(of_row), 0, position_of(of_row), ACCEPT, 4))
        coin = tl.sum(tl.where(tl.arange(0, 4) == 0, four, 0.0), 0)
        stand = coin.to(tl.float64) * draft_prob < target_prob
    tl.store(stands + row, stand.to(tl.int32))
