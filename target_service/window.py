"""The window controller: how many tokens to draft for a sequence, and how long to wait for them.

A first controller behind a small interface: per sequence, from its own acceptance, with a probe so
that it recovers from 0. The caller passes the time. Knows nothing of streams or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.params import SpeculationMode, SpeculationParams

FIXED_WAIT_S = 2.0
"""Longest wait of a FIXED round, so that a drafter that falls silent cannot hold a stream up."""

_DECAY = 0.9
"""Weight of the past when a new round comes in."""
_PRIOR = (1.5, 0.7)
"""Imagined drafts before the first round, and the share of them that stood."""
_ROW_COST = 0.02
"""Cost of one more row of a step, relative to a step with one row, until it has been measured."""
_MAX_JUMP = 2.0
"""A step counts as at most this many times what was expected of it."""
_MISSES_TO_OFF = 8
"""Rounds in a row without a usable draft after which a sequence stops asking. They cost little, as
late drafts are not waited for, and the first drafts may take several steps to come."""
_PROBE_AFTER_S = (0.5, 1.0, 2.0, 4.0)
"""Pause before each probe; the last one repeats."""
_PROBE_MISSES = 6
"""The same while probing: enough for drafts that come three rounds late."""
_PROBE_TOKENS = 2
_LATENCY_FADES = 0.94
"""What is left of a latency that kept a step from waiting, so that waiting is tried again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a sequence wants for its next round."""

    k: int
    """Draft tokens to verify."""
    window: int
    """How far the drafter may run ahead. 0 asks for nothing."""
    worth_s: float
    """How long waiting for them is worth it, for this sequence alone."""


NO_DRAFTS = Wish(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in a round for which drafts were wished."""

    drafted: int
    accepted: int
    answered: bool
    """The drafter has said in the meantime that it has nothing, be it for this position or, late,
    for one before."""


class StepCost:
    """Seconds of a step as base + rows * slope, from exponentially forgotten sums."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weight, rows, rows squared, seconds, rows * seconds
        self.step_s = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Take in one step that ran `rows` tokens."""
        fit = self._fit()
        if fit is not None:
            # A step that was held up says nothing about its rows; a lasting change still gets in.
            seconds = min(seconds, _MAX_JUMP * (fit[0] + fit[1] * rows))
        self.step_s = seconds if self.step_s == 0.0 else 0.8 * self.step_s + 0.2 * seconds
        for i, value in enumerate((1.0, rows, rows * rows, seconds, rows * seconds)):
            self._sums[i] = 0.98 * self._sums[i] + value

    @property
    def row_share(self) -> float:
        """Cost of one more row, as a share of a one-row step."""
        fit = self._fit()
        if fit is None:
            return _ROW_COST
        base, slope = fit
        return min(1.0, slope / (base + slope))

    def _fit(self) -> tuple[float, float] | None:
        """Base and slope, neither below 0; None until steps of several sizes were seen."""
        weight, rows, squares, seconds, products = self._sums
        spread = weight * squares - rows * rows
        if weight < 8 or spread < 1e-6 * weight * squares:
            return None
        slope = max(0.0, (weight * products - rows * seconds) / spread)
        base = max(0.0, (seconds - slope * rows) / weight)
        return (base, slope) if base + slope > 0 else None


class SequenceWindow:
    """The controller of one sequence."""

    def __init__(
        self,
        params: SpeculationParams,
        cost: StepCost,
        *,
        max_draft_tokens: int,
        max_window: int,
        max_wait_s: float,
    ) -> None:
        cap = max_draft_tokens if params.max_draft_tokens is None else params.max_draft_tokens
        self._cap = min(cap, max_draft_tokens, max_window)
        self._mode = params.mode if self._cap > 0 else SpeculationMode.OFF
        self._cost = cost
        self._max_window = max_window
        self._max_wait_s = max_wait_s
        self._tried, self._stood = _PRIOR[0], _PRIOR[0] * _PRIOR[1]
        self._filled = 1.0  # of the answers, the share that had drafts in them
        self._misses = 0
        self._num_probes = 0
        self._next_probe_s: float | None = None  # set while drafting is off
        self._latency_s: float | None = None

    @property
    def wants_drafts(self) -> bool:
        """False for a request that never uses any."""
        return self._mode is not SpeculationMode.OFF

    def wish(self, now_s: float, lag: float = 0.0) -> Wish:
        """What to ask for, and how long to wait for it. `lag`: see DraftTail."""
        if self._mode is SpeculationMode.OFF:
            return NO_DRAFTS
        if self._mode is SpeculationMode.FIXED:
            return Wish(self._cap, self._window(self._cap, lag), FIXED_WAIT_S)
        if self._next_probe_s is not None:
            if now_s < self._next_probe_s:
                return NO_DRAFTS
            k = min(_PROBE_TOKENS, self._cap)
            return Wish(k, self._window(k, lag), self._worth_s(k))
        k = self._best_k()
        if k == 0:
            self._pause(now_s)
            return NO_DRAFTS
        return Wish(k, self._window(k, lag), self._worth_s(k))

    def wait_s(self, wish: Wish, share: float) -> float:
        """How long a step should wait, of which this share gains by it: what one gains, everybody
        in the step pays for. Not at all where drafts are known to come later than that."""
        if self._mode is SpeculationMode.FIXED:
            return wish.worth_s
        limit = wish.worth_s * share
        if self._latency_s is not None and self._latency_s > limit:
            self._latency_s *= _LATENCY_FADES
            return 0.0
        return limit

    def observe(self, outcome: Round, now_s: float) -> None:
        """Take in a round for which drafts were wished."""
        if outcome.drafted:
            tried = outcome.accepted + (outcome.accepted < outcome.drafted)
            self._tried = _DECAY * self._tried + tried
            self._stood = _DECAY * self._stood + outcome.accepted
        if outcome.drafted or outcome.answered:
            self._filled = _DECAY * self._filled + (1 - _DECAY) * (outcome.drafted > 0)
            self._misses = 0
            if self._next_probe_s is not None and (outcome.accepted or not outcome.drafted):
                self._next_probe_s, self._num_probes = None, 0
            elif self._next_probe_s is not None:
                self._pause(now_s)
            return
        self._misses += 1
        limit = _MISSES_TO_OFF if self._next_probe_s is None else _PROBE_MISSES
        if self._misses >= limit and self._mode is SpeculationMode.AUTO:
            self._misses = 0
            self._pause(now_s)

    def observe_latency(self, seconds: float) -> None:
        """Take in the time from confirming tokens to having the drafts behind them."""
        old = self._latency_s
        self._latency_s = seconds if old is None else 0.7 * old + 0.3 * seconds

    def _window(self, k: int, lag: float) -> int:
        # While a round is verified the next one can already be drafted; and where several are
        # confirmed before drafts are here, as many more.
        return min(self._max_window, k + max(k + 1, math.ceil(lag)))

    def _best_k(self) -> int:
        rate = self._stood / self._tried
        share = self._cost.row_share
        best, best_gain, emitted, survival = 0, 1.0, 1.0, 1.0
        for k in range(1, self._cap + 1):
            survival *= rate
            emitted += survival
            gain = emitted / (1 + share * k)
            if gain > best_gain:
                best, best_gain = k, gain
        return best

    def _worth_s(self, k: int) -> float:
        """Waiting pays up to the time that the expected extra tokens would cost without drafts: of
        a drafter that mostly has none, few are expected."""
        rate = self._stood / self._tried
        gained = self._filled * sum(rate**j for j in range(1, k + 1)) * self._cost.step_s / 2
        return min(self._max_wait_s, gained) if self._cost.step_s else self._max_wait_s

    def _pause(self, now_s: float) -> None:
        pause = _PROBE_AFTER_S[min(self._num_probes, len(_PROBE_AFTER_S) - 1)]
        self._num_probes += 1
        self._next_probe_s = now_s + pause
        # A probe starts from the prior, else one bad stretch would be held against it for ever.
        self._tried, self._stood = _PRIOR[0], _PRIOR[0] * _PRIOR[1]
        self._filled = 1.0
        self._latency_s = None
