"""Rejection sampling: keep a draft or replace it so that the target's distribution comes out.

A draft x that was drawn from `draft_probs` stands with probability min(1, target(x) / draft(x));
otherwise the token is drawn from what the draft's distribution lacks, max(0, target - draft)
normalised (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Both distributions
are behind the same filters. The draft, the coin and the replacement each have a noise stream of
their own, keyed by seed and position; a token without a draft is chosen as in exact matching.

One row at a time with numpy, as in `sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.sampling import Candidates, TokenChooser, keep_best, pick
from outrider.engine.sparse_probs import MAX_SPARSE_ENTRIES, SparseProbs
from outrider_kernels.noise import Stream, coin


def replacement(
    chooser: TokenChooser,
    logits_row: torch.Tensor,
    history: Sequence[int],
    draft: int,
    draft_probs: SparseProbs,
) -> int | None:
    """What stands at position len(history) instead of the draft; None: the draft stands.

    `draft_probs` must give the draft a chance.
    """
    candidates = chooser.candidates(logits_row, history)
    weights = np.exp(candidates.scores)  # not normalised
    target_total = float(weights.sum(dtype=np.float64))
    draft_total = sum(draft_probs.probs)  # 1 within the tolerance
    seed, position = chooser.sampling.seed, len(history)
    target_prob = float(weights[candidates.ids == draft].sum()) / target_total
    if coin(seed, position) * draft_probs.of(draft) / draft_total < target_prob:
        return None
    # Where the draft had no chance the target lacks all of its own: those scores stay as they are.
    scores = candidates.scores.copy()
    draft_prob_of = dict(zip(draft_probs.ids, draft_probs.probs, strict=True))
    for place in np.flatnonzero(np.isin(candidates.ids, np.array(draft_probs.ids, np.int64))):
        drafted = draft_prob_of[int(candidates.ids[place])] / draft_total * target_total
        lacking = float(weights[place]) - drafted
        scores[place] = math.log(lacking) if lacking > 0 else -math.inf
    possible = scores > -np.inf
    if not possible.any():  # equal but for rounding, so that the draft itself may come again
        scores, possible = candidates.scores, candidates.scores > -np.inf
    rest = Candidates(candidates.ids[possible], scores[possible] - scores.max())
    token = pick(rest, seed, position, Stream.RESIDUAL)
    return None if token == draft else token


def draw_draft(
    chooser: TokenChooser, logits_row: torch.Tensor, history: Sequence[int]
) -> tuple[int, SparseProbs]:
    """A drafter's token for position len(history), and the very distribution it was drawn from.

    That is its own filtered one, cut to the best few and rounded to float32 as the wire has it.
    """
    candidates = chooser.candidates(logits_row, history)
    best = keep_best(candidates.scores, MAX_SPARSE_ENTRIES)
    ids = candidates.ids[best.ids]
    weights = np.exp(best.scores.astype(np.float64))
    probs = (weights / weights.sum()).astype(np.float32)
    ids, probs = ids[probs > 0], probs[probs > 0]
    scores = np.log(probs.astype(np.float64) / float(probs.max())).astype(np.float32)
    seed, position = chooser.sampling.seed, len(history)
    token = pick(Candidates(ids, scores), seed, position, Stream.DRAFT)
    return token, SparseProbs(tuple(ids.tolist()), tuple(probs.tolist()))
