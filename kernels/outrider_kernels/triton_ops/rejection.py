"""Rejection mode on the device: drafts stand, or give way to what their distribution lacks.

Reference: `replacement` in outrider/engine/rejection.py. Logits are all that is read: every draft
row sums the mass of what its filters keep, and so judges its draft alone; then one row of each
sequence is drawn, either what replaces its first rejected draft or the token behind all of them. A
draft that comes again out of that draw, which only rounding can bring about, ends its round here;
the reference goes on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.noise import Stream
from outrider_kernels.triton_ops.configs_sampling import (
    JUDGE,
    REPLACE,
    SETTLE,
)
from outrider_kernels.triton_ops.judge import judge_kernel
from outrider_kernels.triton_ops.launch import launch
from outrider_kernels.triton_ops.mass import MASS_OF_ONE, weights_of
from outrider_kernels.triton_ops.noise import fixed_log, gumbel_of, words_of
from outrider_kernels.triton_ops.rounds import Rounds
from outrider_kernels.triton_ops.sampling import Scan
from outrider_kernels.triton_ops.scores import (
    best_found,
    best_of,
    is_kept,
    load_logits,
    scores_of,
)
from outrider_kernels.triton_ops.settings import (
    min_p_of,
    num_ids_of,
    position_of,
    seed_of,
    temperature_of,
)

EXACT: tl.constexpr = tl.constexpr(int(Stream.EXACT))
RESIDUAL: tl.constexpr = tl.constexpr(int(Stream.RESIDUAL))
_SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # that a logarithm is made of


@triton.jit
def first_rejected(sequences, stands, sequence, DRAFTS: tl.constexpr):
    """A sequence's first row, number of drafts, and how many of them stand first."""
    first, num_drafts = tl.load(sequences + sequence * 2), tl.load(sequences + sequence * 2 + 1)
    place = tl.arange(0, DRAFTS)
    stand = tl.load(stands + first + place, mask=place < num_drafts, other=0)
    return first, num_drafts, tl.min(tl.where(stand == 0, place, DRAFTS), 0)


@triton.jit
def lacking_of(
    ids, scores, weights, mass, draft_ids, draft_probs, row, first, BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Scores of what the draft's distribution lacks; those that it does not name stay as they are.

    ids are first to first + BLOCK - 1.
    """
    entries = row.to(tl.int64) * ENTRIES
    entry = entries + tl.arange(0, ENTRIES)
    named = tl.load(draft_ids + entry)
    scale = (
        mass.to(tl.float64) / MASS_OF_ONE / tl.sum(tl.load(draft_probs + entry).to(tl.float64), 0)
    )
    begin = tl.sum((named < first).to(tl.int32), 0)
    end = tl.sum((named < first + BLOCK).to(tl.int32), 0)
    for i in range(begin, end):
        token, prob = tl.load(draft_ids + entries + i), tl.load(draft_probs + entries + i)
        lacking = weights - (prob.to(tl.float64) * scale).to(tl.float32)
        log = tl.where(
            lacking >= _SMALLEST, fixed_log(tl.maximum(lacking, _SMALLEST)), float("-inf")
        )
        scores = tl.where(ids == token, log, scores)
    return scores


@triton.jit(do_not_specialize=["width", "blocks"])
def replace_kernel(
    logits,
    settings,
    block_best,
    block_id,
    row_best,
    cuts,
    sequences,
    drafts,
    draft_ids,
    draft_probs,
    stands,
    width,
    blocks,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (sequence, block): the best of score + noise of what the draft lacks, and of all."""
    sequence, block = tl.program_id(0), tl.program_id(1)
    first, num_drafts, accepted = first_rejected(sequences, stands, sequence, DRAFTS)
    row = first + accepted
    of_row = settings + row * 8
    noisy = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    noisy_of_all, token_of_all = noisy, token
    best_id, temperature = tl.load(cuts + row * 4).to(tl.int32), temperature_of(of_row)
    if (best_id >= 0) & (temperature > 0.0):
        best = tl.load(row_best + row)
        cut_key = tl.load(cuts + row * 4 + 1).to(tl.int32)
        cut_id = tl.load(cuts + row * 4 + 2).to(tl.int32)
        mass = tl.load(cuts + row * 4 + 3)
        ids, values = load_logits(logits, row, block, width, num_ids_of(of_row), BLOCK, UNIT)
        scores = scores_of(values, best, temperature)
        weights = weights_of(scores)
        kept = is_kept(ids, scores, weights, cut_key, cut_id, min_p_of(of_row))
        is_draft = tl.load(drafts + row) >= 0
        stream = tl.where(is_draft, RESIDUAL, EXACT)
        words = words_of(seed_of(of_row), block * BLOCK, position_of(of_row), stream, BLOCK)
        noise = gumbel_of(words)
        noisy_of_all, token_of_all = best_of(tl.where(kept, scores + noise, float("-inf")), ids)
        if is_draft:
            scores = lacking_of(
                ids, scores, weights, mass, draft_ids, draft_probs, row, block * BLOCK, BLOCK,
                ENTRIES,
            )  # fmt: skip
            noisy, token = best_of(tl.where(kept, scores + noise, float("-inf")), ids)
    place = 2 * sequence * blocks + block
    tl.store(block_best + place, noisy)
    tl.store(block_id + place, token)
    tl.store(block_best + place + blocks, noisy_of_all)
    tl.store(block_id + place + blocks, token_of_all)


@triton.jit(do_not_specialize=["width", "blocks"])
def settle_kernel(
    block_best,
    block_id,
    cuts,
    sequences,
    drafts,
    stands,
    tokens,
    counts,
    width,
    blocks,
    BLOCKS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Program: a sequence. Drafts that stand and the token behind them, then -1."""
    sequence = tl.program_id(0)
    first, num_drafts, accepted = first_rejected(sequences, stands, sequence, DRAFTS)
    noisy, token = best_found(block_best, block_id, 2 * sequence, blocks, BLOCKS)
    noisy_of_all, token_of_all = best_found(block_best, block_id, 2 * sequence + 1, blocks, BLOCKS)
    # Nothing is lacking, but for rounding: then all may come.
    is_lacking = noisy > float("-inf")
    drawn = tl.where(is_lacking, token, token_of_all).to(tl.int64)
    any_drawn = is_lacking | (noisy_of_all > float("-inf"))
    best_id = tl.load(cuts + (first + accepted) * 4)
    last = tl.where(any_drawn & (best_id >= 0), drawn, best_id)
    place = tl.arange(0, 2 * DRAFTS)
    draft = tl.load(drafts + first + place, mask=place < num_drafts, other=-1)
    emitted = tl.where(place < accepted, draft, tl.where(place == accepted, last, -1))
    tl.store(tokens + sequence.to(tl.int64) * width + place, emitted, mask=place < width)
    tl.store(counts + sequence, accepted + 1)


def reject(
    logits: torch.Tensor, settings: torch.Tensor, rounds: Rounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection mode on float32 logits [rows, vocab], with the settings of `settings_table`.

    The result is as that of `matching.accept`. ValueError for other rows than those of the rounds,
    and for rounds without the drafts' distributions.
    """
    rounds.check(len(logits))
    if rounds.draft_ids is None or rounds.draft_probs is None:
        raise ValueError("rejection needs the distributions that drafts were drawn from")
    scan = Scan(logits, settings)
    scan.find_cuts()
    tokens, counts = rounds.outputs()
    stands = torch.empty(scan.num_rows, dtype=torch.int32, device=logits.device)
    probs = (rounds.draft_ids, rounds.draft_probs)
    numbers = (scan.width, scan.blocks)
    launch(
        judge_kernel,
        (scan.num_rows,),
        JUDGE[scan.unit],
        scan.logits,
        scan.settings,
        *scan.rows,
        rounds.drafts,
        *probs,
        stands,
        *numbers,
    )
    found = [
        torch.empty((2 * len(counts), scan.blocks), dtype=f.dtype, device=f.device)
        for f in scan.found
    ]
    launch(
        replace_kernel,
        (len(counts), scan.blocks),
        REPLACE[scan.unit],
        scan.logits,
        scan.settings,
        *found,
        *scan.rows,
        rounds.sequences,
        rounds.drafts,
        *probs,
        stands,
        *numbers,
    )
    launch(
        settle_kernel,
        (len(counts),),
        SETTLE,
        *found,
        scan.rows[1],
        rounds.sequences,
        rounds.drafts,
        stands,
        tokens,
        counts,
        tokens.shape[1],
        scan.blocks,
    )
    return tokens, counts
