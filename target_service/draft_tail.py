"""Drafts of one sequence behind its confirmed tokens, aligned by absolute position.

A pure state machine: knows nothing of streams, drafters or the engine. The rules are those of TCP
reassembly with one twist, that a later segment may correct an earlier one.

    position   0 ............ len(confirmed) ........ end
    confirmed  [ t0 t1 t2 .. ]
    tail                      [ d0 d1 d2 ..         ]
    proposal             [ start ...... ]                overlaps are trimmed or replace

Every proposed token is accounted for once: it is verified (drafted), it is still open, or it is
counted in `unused` under one of the reasons below.

In rejection mode each draft has the distribution that it was drawn from beside it, and which draft
is verified must not depend on what was drawn: where two proposals overlap, the later one counts
whether or not it says the same, and a draft without a usable distribution ends its proposal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from outrider.engine.sparse_probs import SparseProbs


class Unused(Enum):
    """Why a proposed token was never verified."""

    LATE = "late"
    """It equals a token that was confirmed before it came."""
    STALE = "stale"
    """Drafted behind a token that the target did not take, or for an older epoch."""
    MISMATCH = "mismatch"
    """It or a token before it differs from a confirmed token."""
    GAP = "gap"
    """Tokens before it are missing."""
    DUPLICATE = "duplicate"
    """It was proposed before."""
    REPLACED = "replaced"
    """A later proposal said otherwise."""
    TRIMMED = "trimmed"
    """The target's own next token made it known before it was verified."""
    WINDOW = "window"
    """It lies further ahead than the largest window, or came in a flood."""
    MALFORMED = "malformed"
    """The proposal broke the protocol. In rejection mode also a draft without a distribution, or
    without a chance in its own, and what comes behind it."""
    FINISHED = "finished"
    """The sequence ended, or ended before this token."""
    LOST = "lost"
    """The drafter went away, or the sequence moved to another one."""


class Arrival(Enum):
    """What became of a proposal."""

    USED = "used"
    STALE = "stale"
    GAP = "gap"
    MALFORMED = "malformed"
    FLOOD = "flood"
    """More came during one round than a drafter can mean."""


_MAX_HELD = 64
_MAX_HELD_TOKENS = 1024
"""Of one proposal during a round; no window is as large."""

_LAG_FALLS = 0.1
"""Share of the difference to the last one."""


@dataclass(slots=True)
class DraftTotals:
    """Counts over all sequences."""

    num_proposed: int = 0
    unused: Counter[Unused] = field(default_factory=Counter)
    arrivals: Counter[Arrival] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ProposedTokens:
    """A proposal without its timing."""

    epoch: int
    seen_len: int
    start: int
    tokens: Sequence[int]
    probs: Sequence[SparseProbs | None] = ()
    """In rejection mode, for each token; None or missing: it cannot be used."""


class DraftTail:
    """The tail of one sequence. `confirmed` is shared with the sequence and only grows."""

    def __init__(
        self,
        confirmed: list[int],
        vocab_size: int,
        max_tail: int,
        totals: DraftTotals,
        *,
        with_probs: bool = False,
    ) -> None:
        """`with_probs` is rejection mode."""
        self._confirmed = confirmed
        self._vocab_size = vocab_size
        self._max_tail = max_tail
        self._totals = totals
        self._with_probs = with_probs
        self.epoch = 1
        self.tokens: list[int] = []
        self.probs: list[SparseProbs] = []
        """One a token in rejection mode, else empty."""
        self.unused: Counter[Unused] = Counter()
        self.needs_resync = False
        """Tokens are missing: `restart`, and the drafter needs the prefix again."""
        self.lag = 0.0
        """Tokens that are confirmed while a proposal is made and on its way: so much of a window
        comes too late. Rises at once and falls slowly."""
        self._valid_from = 0
        self._nothing_behind = self._nothing_usable_behind = -1
        self._said_nothing = False
        self._in_round = False
        self._num_verifying = 0
        self._num_orphaned = 0  # being verified, of an epoch that is over
        self._held: list[ProposedTokens] = []

    @property
    def num_open(self) -> int:
        """Proposed tokens that are neither verified nor unused yet."""
        held = sum(len(proposal.tokens) for proposal in self._held)
        return len(self.tokens) + self._num_orphaned + held

    @property
    def end(self) -> int:
        """The position behind the last draft."""
        return len(self._confirmed) + len(self.tokens)

    @property
    def exhausted(self) -> bool:
        """The drafter has said that it has nothing to add behind the tail."""
        return self._nothing_behind == self.end

    @property
    def settled(self) -> bool:
        """The same, or what it said there cannot be used: whoever waits, waits in vain."""
        return self.exhausted or self._nothing_usable_behind == self.end

    def take_empty(self) -> bool:
        """The drafter has said, since this was last asked, that it has nothing at all behind what
        it had seen: then no drafts are lost, not even where that comes late."""
        said, self._said_nothing = self._said_nothing, False
        return said

    def add(self, proposal: ProposedTokens) -> None:
        """Align a proposal, at once or when the round that is being verified is over."""
        self._totals.num_proposed += len(proposal.tokens)
        if not self._in_round:
            self._align(proposal)
        elif len(self._held) < _MAX_HELD and len(proposal.tokens) <= _MAX_HELD_TOKENS:
            # A copy: tokens may come as part of a message that is a thousand times as large.
            self._held.append(replace(proposal, tokens=list(proposal.tokens)))
        else:
            self._refuse(Arrival.FLOOD, Unused.WINDOW, proposal.tokens)

    def begin_round(self, num_verifying: int) -> None:
        """The first drafts are being verified: what comes is held back until `advance`."""
        self._in_round = True
        self._num_verifying = num_verifying

    def advance(self, num_drafted: int, num_new: int) -> None:
        """Take in the `num_new` tokens just appended to `confirmed`; `num_drafted` were verified.

        A difference between the tail and what the target chose drops the tail and makes everything
        stale that was drafted without knowing that token.
        """
        new = self._confirmed[len(self._confirmed) - num_new :]
        same = _common_prefix(self.tokens, new)
        if same < min(len(self.tokens), num_new):
            self._valid_from = len(self._confirmed) - num_new + same + 1
            self._count(Unused.MISMATCH, len(self.tokens) - num_drafted)
            self.tokens, self.probs = [], []
            self._nothing_behind = self._nothing_usable_behind = -1  # said of another text
        else:
            # What was confirmed without having been verified was foretold by the bonus token.
            self._count(Unused.TRIMMED, min(len(self.tokens), num_new) - num_drafted)
            self._count(Unused.LOST, self._num_orphaned - num_drafted)
            self.tokens, self.probs = self.tokens[num_new:], self.probs[num_new:]
        self._in_round = False
        self._num_verifying = self._num_orphaned = 0
        held, self._held = self._held, []
        for proposal in held:
            self._align(proposal)

    def restart(self, reason: Unused) -> None:
        """A new epoch: the tail goes, and whatever is still on its way is stale."""
        self.discard(reason)
        self._num_orphaned += len(self.tokens)
        self._num_verifying = 0
        self._clear()
        self.epoch += 1
        self.needs_resync = False
        self.lag = 0.0
        self._valid_from = 0
        self._nothing_behind = self._nothing_usable_behind = -1

    def discard(self, reason: Unused, keep: int = 0) -> None:
        """Drop the tail behind its first `keep` tokens, and behind those that are verified now."""
        keep = max(keep, self._num_verifying)
        self._count(reason, len(self.tokens) - keep)
        del self.tokens[keep:], self.probs[keep:]

    def finish(self) -> None:
        """The sequence has ended: everything left is unused."""
        self._count(Unused.FINISHED, self.num_open)
        self._clear()
        self._held.clear()
        self._num_verifying = self._num_orphaned = 0

    def _clear(self) -> None:
        self.tokens.clear()
        self.probs.clear()

    def _align(self, proposal: ProposedTokens) -> None:
        tokens = proposal.tokens
        probs = self._usable_probs(proposal)
        if proposal.epoch != self.epoch:
            self._refuse(Arrival.STALE, Unused.STALE, tokens)
        elif self._is_malformed(proposal) or (self._with_probs and tokens and not probs):
            # Before a gap is looked for: the prefix once more would bring the same once more.
            self._nothing_usable_behind = self.end
            self._refuse(Arrival.MALFORMED, Unused.MALFORMED, tokens)
        elif proposal.seen_len < self._valid_from:
            self._refuse(Arrival.STALE, Unused.STALE, tokens)
        elif proposal.start > self.end:
            if tokens:
                self.needs_resync = True
            else:  # nothing that would be of use behind the prefix, sent once more
                self._nothing_usable_behind = self.end
            self._refuse(Arrival.GAP, Unused.GAP, tokens)
        else:
            self._use(proposal, probs)

    def _use(self, proposal: ProposedTokens, probs: list[SparseProbs]) -> None:
        tokens = proposal.tokens[: len(probs)] if self._with_probs else proposal.tokens
        self._totals.arrivals[Arrival.USED] += 1
        if tokens:
            lag = len(self._confirmed) - proposal.seen_len
            self.lag = max(lag, self.lag + _LAG_FALLS * (lag - self.lag))
        self._count(Unused.MALFORMED, len(proposal.tokens) - len(tokens))
        known = self._num_confirmed(proposal.start, tokens)
        if known is not None:
            position = max(proposal.start, len(self._confirmed))
            self._merge(position, tokens[known:], probs[known:])
        if len(tokens) < len(proposal.tokens):
            self._nothing_usable_behind = self.end
        if not tokens:
            self._said_nothing |= proposal.start == proposal.seen_len
            if proposal.seen_len == len(self._confirmed):
                self._nothing_behind = proposal.start

    def _usable_probs(self, proposal: ProposedTokens) -> list[SparseProbs]:
        """Of the tokens from the first on that were possible under what they were drawn from."""
        usable: list[SparseProbs] = []
        if self._with_probs:
            for token, probs in zip(proposal.tokens, proposal.probs, strict=False):
                if probs is None or probs.of(token) <= 0:
                    break
                usable.append(probs)
        return usable

    def _count(self, reason: Unused, num_tokens: int) -> None:
        if num_tokens > 0:
            self.unused[reason] += num_tokens
            self._totals.unused[reason] += num_tokens

    def _refuse(self, arrival: Arrival, reason: Unused, tokens: Sequence[int]) -> None:
        self._totals.arrivals[arrival] += 1
        self._count(reason, len(tokens))

    def _is_malformed(self, proposal: ProposedTokens) -> bool:
        return (
            proposal.seen_len > len(self._confirmed)
            or proposal.start < proposal.seen_len
            or any(token >= self._vocab_size for token in proposal.tokens)
        )

    def _num_confirmed(self, start: int, tokens: Sequence[int]) -> int | None:
        """Tokens whose positions are confirmed; None if a confirmed token contradicts them."""
        overlap = self._confirmed[start : start + len(tokens)]
        same = _common_prefix(tokens, overlap)
        self._count(Unused.LATE, same)
        if same == len(overlap):
            return same
        self._count(Unused.MISMATCH, len(tokens) - same)
        self.discard(Unused.MISMATCH)
        self._valid_from = start + same + 1
        return None

    def _merge(self, position: int, fresh: Sequence[int], probs: Sequence[SparseProbs]) -> None:
        offset = position - len(self._confirmed)
        known = self.tokens[offset : offset + len(fresh)]
        same = 0 if self._with_probs else _common_prefix(fresh, known)
        self._count(Unused.DUPLICATE, same)
        if same < len(known):
            self.discard(Unused.REPLACED, keep=offset + same)
        rest = fresh[same:]
        room = max(0, self._max_tail - len(self.tokens))
        self.tokens.extend(rest[:room])
        self.probs.extend(probs[:room])
        self._count(Unused.WINDOW, len(rest[room:]))


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
