"""Rejection sampling: keep a draft or replace it so that the target's distribution comes out.

A draft x that was drawn from `draft_probs` stands with probability min(1, target(x) / draft(x));
otherwise the token is drawn from what the draft's distribution lacks, max(0, target - draft)
normalised (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Both distributions
are behind the same filters. The draft, the coin and the replacement each have a noise stream of
their own, keyed by seed and position; a token without a draft is chosen as in exact matching.

All of it in float64 from float32 logits, one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.sampling import Candidates, TokenChooser, keep_best, pick
from outrider.engine.sparse_probs import MAX_SPARSE_ENTRIES, SparseProbs
from outrider_kernels.noise import Stream, coin

Probs = NDArray[np.float64]


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
    target = softmax(candidates)
    lacking = target.copy()
    total = sum(draft_probs.probs)  # 1 within the tolerance
    shared = np.isin(candidates.ids, np.array(draft_probs.ids, np.int64))
    for index in np.flatnonzero(shared):
        lacking[index] -= draft_probs.of(int(candidates.ids[index])) / total
    seed, position = chooser.sampling.seed, len(history)
    target_prob = float(target[candidates.ids == draft].sum())
    if coin(seed, position) * draft_probs.of(draft) / total < target_prob:
        return None
    if not (lacking > 0).any():
        lacking = target  # equal but for rounding, so that the draft itself may come again
    token = _draw(candidates.ids, lacking, seed, position, Stream.RESIDUAL)
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
    probs = softmax(Candidates(ids, best.scores)).astype(np.float32)
    ids, probs = ids[probs > 0], probs[probs > 0]
    seed, position = chooser.sampling.seed, len(history)
    token = _draw(ids, probs.astype(np.float64), seed, position, Stream.DRAFT)
    return token, SparseProbs(tuple(ids.tolist()), tuple(probs.tolist()))


def softmax(candidates: Candidates) -> Probs:
    """The probability of each candidate."""
    weights = np.exp(candidates.scores.astype(np.float64))
    probs: Probs = weights / weights.sum()
    return probs


def _draw(ids: NDArray[np.int64], weights: Probs, seed: int, position: int, stream: int) -> int:
    """One of the ids with a weight above 0, in proportion to the weights."""
    possible = weights > 0
    scores = np.log(weights[possible] / weights.max())
    return pick(Candidates(ids[possible], scores.astype(np.float32)), seed, position, stream)
