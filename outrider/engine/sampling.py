"""Which token comes next: one pure function of a row of logits, the settings and the history.

Every position uses it: without drafts, at a draft's position, after a mismatch, for the bonus
token, and in a drafter that guesses with the same settings. It looks at one row at a time with
numpy (one thread, fixed order of every sum), so neither batch mates nor thread counts can change a
choice. `choosing` has it done by compiled code, which chooses the same.

The filters run in one order: repetition, frequency and presence penalties, bias, minimum length;
then, unless greedy, temperature, top_k, top_p, min_p. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.params import SamplingParams
from outrider_kernels.choice import Choice, RowEdits
from outrider_kernels.mass import masses_of, weights_of
from outrider_kernels.noise import (
    MAX_GUMBEL,
    Stream,
    all_words,
    gumbel_array,
    philox_words,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_MIN_TEMPERATURE = 1e-30
"""Below this a float32 division by the temperature could give 0 / 0; the result is the same."""
_HEAD_DEPTHS = (4.0, 8.0, 16.0)
"""How far below the best score a filter first looks for the tokens that it keeps."""
_SMALL = 256
"""Up to this many candidates all get noise; above, only those that can still win."""
_NUM_PILOTS = 64
"""Candidates that set the score which all others have to reach."""


class BadLogits(ValueError):
    """The row has no finite best token: it holds NaN or infinities, or everything is banned."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that the filters kept."""

    ids: Ids
    scores: Floats
    """logit / temperature, less that of the best token: 0 for the best, below for the others."""


class TokenChooser:
    """One sequence's settings, ready to choose."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        *,
        prompt_len: int,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        num_tokens: int | None = None,
    ) -> None:
        """Ids from `num_tokens` on are padding of the logits and are never chosen."""
        self.sampling = sampling
        self.vocab_size = vocab_size
        """Of the rows; wider ones have logits behind it that nobody looks at."""
        self._prompt_len = prompt_len
        self._num_tokens = vocab_size if num_tokens is None else num_tokens
        self._min_tokens = min_tokens
        self._stop_ids = np.array(sorted(i for i in stop_token_ids if i < vocab_size), np.int64)
        self._bias_ids = np.array([i for i, _ in sampling.logit_bias], np.int64)
        self._bias_values = np.array([v for _, v in sampling.logit_bias], np.float32)
        self._looks_back = bool(
            sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.repetition_penalty != 1.0
            or sampling.logit_bias
        )

    def choose(self, logits_row: torch.Tensor, history: Sequence[int]) -> int:
        """The token at position len(history), given the logits that predict it, float32 [vocab]."""
        logits = self._adjust(logits_row.numpy(), history)
        if self.sampling.greedy:
            best = int(logits.argmax())
            _require_finite(float(logits[best]))
            return best
        candidates = self._filter(logits)
        return pick(candidates, self.sampling.seed, len(history), Stream.EXACT)

    def takes_logits_as_they_are(self, num_tokens: int) -> bool:
        """Whether nothing that was said before changes the logits behind so many tokens."""
        if self._looks_back:
            return False
        return num_tokens - self._prompt_len >= self._min_tokens or self._stop_ids.size == 0

    def adjusted(self, logits_row: torch.Tensor, history: Sequence[int]) -> torch.Tensor:
        """The row behind penalties, bias and minimum length: what `choice` takes."""
        return torch.from_numpy(self._adjust(logits_row.numpy(), history))

    def edits(self, history: Sequence[int]) -> RowEdits:
        """What `adjusted` changes, for operations that do it where the row lies."""
        params, output = self.sampling, history[self._prompt_len :]
        return RowEdits(
            history,
            output,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            dict(params.logit_bias),
            self._stop_ids.tolist() if len(output) < self._min_tokens else (),
        )

    def choice(
        self, logits: torch.Tensor, position: int, drafts: Sequence[int] = (), first: int = 0
    ) -> Choice:
        """These settings for compiled code, on adjusted rows, from the first one on."""
        if logits.shape[1] < self.vocab_size:
            raise ValueError(f"expected rows of {self.vocab_size} logits, got {logits.shape}")
        params = self.sampling
        return Choice(
            logits,
            min(self._num_tokens, self.vocab_size),
            position,
            drafts,
            params.seed,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            first,
        )

    def candidates(self, logits_row: torch.Tensor, history: Sequence[int]) -> Candidates:
        """What the filters keep, in no particular order; a greedy setting keeps its one token."""
        if self.sampling.greedy:
            best = self.choose(logits_row, history)
            return Candidates(np.array([best], np.int64), np.zeros(1, np.float32))
        return self._filter(self._adjust(logits_row.numpy(), history))

    def _adjust(self, row: Floats, history: Sequence[int]) -> Floats:
        """Penalties, bias, minimum length, padding; copies the row before it changes anything."""
        if row.shape != (self.vocab_size,):
            raise ValueError(f"expected a row of {self.vocab_size} logits, got {row.shape}")
        params = self.sampling
        copied = False
        if params.repetition_penalty != 1.0:
            row, copied = row.copy(), True
            _penalise_repetition(row, history, params.repetition_penalty)
        output = history[self._prompt_len :]
        if output and (params.frequency_penalty or params.presence_penalty):
            row, copied = row if copied else row.copy(), True
            ids, counts = np.unique(np.array(output, np.int64), return_counts=True)
            row[ids] -= counts.astype(np.float32) * np.float32(params.frequency_penalty)
            row[ids] -= np.float32(params.presence_penalty)
        if self._bias_ids.size:
            row, copied = row if copied else row.copy(), True
            row[self._bias_ids] += self._bias_values
        if len(output) < self._min_tokens and self._stop_ids.size:
            row, copied = row if copied else row.copy(), True
            row[self._stop_ids] = -np.inf
        if self._num_tokens < self.vocab_size:
            row = row if copied else row.copy()
            row[self._num_tokens :] = -np.inf
        return row

    def _filter(self, logits: Floats) -> Candidates:
        """Temperature, top_k, top_p, min_p."""
        params = self.sampling
        best = logits.max()
        _require_finite(float(best))
        scores = logits - best
        scores /= np.float32(max(params.temperature, _MIN_TEMPERATURE))
        top_k = params.top_k if 0 < params.top_k < scores.size else 0
        if not top_k and params.top_p >= 1.0:
            if params.min_p == 0.0:
                return Candidates(np.arange(scores.size), scores)
            ids = np.flatnonzero(weights_of(scores) >= np.float32(params.min_p))
            return Candidates(ids, scores[ids])
        return keep_best(scores, top_k, params.top_p, params.min_p)


def keep_best(scores: Floats, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> Candidates:
    """The filters that need an order, best first; scores are at most 0, ids are their places.

    Sorts only as many of the best as they can keep.
    """
    masses = None if top_k else masses_of(weights_of(scores))
    allowed = 0.0 if masses is None else top_p * float(masses.sum())
    ids = _head(scores, masses, top_k, allowed)
    scores = scores[ids]
    # Scores are at most 0: the bits of -score rise as the score falls; ids rise with their place.
    keys = np.abs(scores).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(ids.size, dtype=np.uint64)
    order = (np.sort(keys) & np.uint64(0xFFFFFFFF)).astype(np.int64)
    ids, scores = ids[order], scores[order]
    if top_k:
        ids, scores = ids[:top_k], scores[:top_k]
    weights = weights_of(scores)
    if top_p < 1.0:
        masses = masses_of(weights)
        if top_k:
            allowed = top_p * float(masses.sum())
        num_kept = 1 + int(np.searchsorted(np.cumsum(masses).astype(np.float64), allowed))
        ids, scores, weights = ids[:num_kept], scores[:num_kept], weights[:num_kept]
    if min_p > 0.0:
        kept = weights >= np.float32(min_p)
        ids, scores = ids[kept], scores[kept]
    return Candidates(ids, scores)


def _head(scores: Floats, masses: Ids | None, top_k: int, allowed: float) -> Ids:
    """Ids, rising, among which are the top_k best, or the best ones that weigh `allowed`."""
    for depth in _HEAD_DEPTHS:
        ids = np.flatnonzero(scores > np.float32(-depth))
        enough = ids.size >= top_k if masses is None else float(masses[ids].sum()) >= allowed
        if enough:
            return ids
    return np.arange(scores.size)


def pick(candidates: Candidates, seed: int, position: int, stream: int) -> int:
    """The candidate with the best score + noise; ties to the lowest id."""
    ids, scores = candidates.ids, candidates.scores
    if ids.size > _SMALL:
        ids, scores = _can_still_win(ids, scores, seed, position, stream)
    noisy = scores + gumbel_array(seed, position, ids, stream)
    return int(ids[noisy == noisy.max()].min())


def _can_still_win(
    ids: Ids, scores: Floats, seed: int, position: int, stream: int
) -> tuple[Ids, Floats]:
    """Those that may reach the best of a few pilots, judged without a logarithm.

    With noise g = -log(E) and E > w, a candidate reaches score + g >= bar only if
    w < exp(score - bar). A thousandth is far more than the rounding of all of this.
    """
    pilots = np.flatnonzero(scores >= np.float32(-2))[:_NUM_PILOTS]
    bar = (scores[pilots] + gumbel_array(seed, position, ids[pilots], stream)).max()
    hopeful = np.flatnonzero(scores >= bar - np.float32(MAX_GUMBEL))
    if 4 * hopeful.size < ids.size:
        ids, scores = ids[hopeful], scores[hopeful]
        words = philox_words(seed, ids, position, stream)
    else:
        # By id: filters hand candidates over best first.
        words = all_words(seed, int(ids.max()) + 1, position, stream)[ids]
    limits = np.exp(scores - bar)
    limits *= np.float32(2.0**32 * 1.001)
    winners = np.flatnonzero(words.astype(np.float32) <= limits)
    return ids[winners], scores[winners]


def _penalise_repetition(row: Floats, history: Sequence[int], penalty: float) -> None:
    """Make tokens of prompt and output less likely, in place."""
    ids = np.unique(np.array(history, np.int64))
    seen = row[ids]
    factor = np.float32(penalty)
    row[ids] = np.where(seen < 0, seen * factor, seen / factor)


def _require_finite(best: float) -> None:
    """Raise BadLogits unless there is a best token to take."""
    if not np.isfinite(best):
        raise BadLogits(f"the best logit is {best}")


def logprobs(
    logits_row: torch.Tensor, token_id: int, num_top: int = 0
) -> tuple[float, list[tuple[int, float]]]:
    """The token's log-probability before any setting, and the likeliest (id, logprob) in order."""
    row = logits_row.numpy()
    best = row.max()
    _require_finite(float(best))
    shifted = row - best
    log_total = np.log(np.exp(shifted).sum())
    top = keep_best(shifted, num_top) if num_top else None
    pairs = [] if top is None else zip(top.ids.tolist(), top.scores - log_total, strict=True)
    return float(shifted[token_id] - log_total), [(i, float(value)) for i, value in pairs]
