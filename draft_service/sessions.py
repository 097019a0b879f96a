"""One sequence as the drafter sees it: confirmed tokens, then its own tail.

    token_ids   [ confirmed by the target | tail: drafted, not confirmed ]
                 0          confirmed_len ^                        len() ^

Pure state: it applies what the target confirms, keeps the part of the tail that agrees, and keeps
account of what was sent. Knows nothing of how tokens are found, nor of streams or protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.sparse_probs import SparseProbs
from outrider.params import SamplingParams, VerificationMode


@dataclass(frozen=True, slots=True)
class Opening:
    """What a drafter has to know of a sequence; it does not change within an epoch."""

    prompt_len: int
    """Tokens of the prompt; those behind count as generated."""
    max_len: int
    """The length at which the sequence ends at the latest."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How the target chooses tokens, the seed included."""
    min_tokens: int = 0
    """No stop token counts before this many generated tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence."""
    vocab_size: int = 0
    """Only ids below it may be proposed; 0: the target did not say."""
    verification: VerificationMode = VerificationMode.EXACT_MATCH
    """How the target checks drafts."""
    traceparent: str = ""
    """The target's span for the request; empty if it has none."""

    @property
    def sends_probs(self) -> bool:
        """The target wants to know what each token was drawn from."""
        return self.verification is VerificationMode.REJECTION


@dataclass(frozen=True, slots=True)
class Update:
    """What the target says of one sequence in one frame."""

    sequence_id: int
    epoch: int
    update_seq: int
    base_len: int
    """Confirmed tokens before `tokens`."""
    tokens: Sequence[int]
    window: int
    finished: bool = False
    opening: Opening | None = None
    """Only in the first update of an epoch."""
    received_s: float = 0.0
    """Local monotonic time at which it was read."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """Drafted tokens that the target has not been told yet."""

    start: int
    """Absolute position of the first one."""
    tokens: list[int]
    logprobs: list[float]
    """One a token, or empty when the proposer has none."""
    compute_s: float
    """Time spent on them."""
    probs: list[SparseProbs] = field(default_factory=list)
    """What each was drawn from; only where the target wants to know."""


class Gap(Exception):
    """An update does not follow the confirmed tokens: the prefix has to be sent again."""


class Session:
    """One epoch of one sequence."""

    def __init__(self, sequence_id: int, epoch: int, opening: Opening) -> None:
        self.sequence_id = sequence_id
        self.epoch = epoch
        self.opening = opening
        self.token_ids: list[int] = []
        self.confirmed_len = 0
        self.window = 0
        self.update_seq = 0
        self.received_s = 0.0
        self.closed = False
        self.dry = False
        """The proposer found nothing behind the tail since the last update."""
        self.stable_len = 0
        """No token before this position has changed since the last `settle()`."""
        self._tail_logprobs: list[float] = []
        self._tail_probs: list[SparseProbs] = []
        self._next_unsent = 0  # absolute position
        self._compute_s = 0.0
        self._dry_told = False

    @property
    def limit(self) -> int:
        """The length up to which it may draft."""
        return min(self.confirmed_len + self.window, self.opening.max_len)

    @property
    def room(self) -> int:
        """How many more tokens it may draft."""
        return max(0, self.limit - len(self.token_ids))

    @property
    def tail_ended(self) -> bool:
        """The tail ends with a token at which the target would stop."""
        last = len(self.token_ids) - 1
        return last >= self.confirmed_len and self._stops_at(last, self.token_ids[last])

    @property
    def wants_tokens(self) -> bool:
        """There is room, something to draft from, and no reason to believe it is in vain."""
        if self.closed or self.dry or not self.token_ids:
            return False
        return self.room > 0 and not self.tail_ended

    @property
    def stuck(self) -> bool:
        """The window has room that will stay empty until the next update."""
        if self.closed or self.window == 0:
            return False
        return len(self.token_ids) < self.confirmed_len + self.window and not self.wants_tokens

    def settle(self) -> int:
        """From here on `stable_len` tells what has changed. Returns what it was."""
        stable, self.stable_len = self.stable_len, len(self.token_ids)
        return stable

    def apply(self, update: Update) -> None:
        """Take confirmed tokens; raises Gap, and then nothing has changed."""
        if update.base_len != self.confirmed_len:
            raise Gap(f"base_len is {update.base_len}, confirmed are {self.confirmed_len}")
        tokens = update.tokens
        comparable = min(len(self.token_ids) - self.confirmed_len, len(tokens))
        agreed = 0
        while agreed < comparable and (
            tokens[agreed] == self.token_ids[self.confirmed_len + agreed]
        ):
            agreed += 1
        if agreed < len(tokens):
            self._replace_from(self.confirmed_len + agreed, tokens[agreed:])
        else:
            del self._tail_logprobs[:agreed], self._tail_probs[:agreed]
        self.confirmed_len += len(tokens)
        self._next_unsent = max(self._next_unsent, self.confirmed_len)
        self.window = update.window
        self.update_seq = update.update_seq
        self.received_s = update.received_s
        self.dry = False
        self._dry_told = False

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] = (),
        compute_s: float = 0.0,
        probs: Sequence[SparseProbs] = (),
    ) -> int:
        """Append drafted tokens as far as they may go; returns how many were kept.

        Without `probs` each of them is what the proposer would always have said.
        """
        kept = 0
        while kept < len(tokens) and self.room > 0 and not self.tail_ended:
            token, position = tokens[kept], len(self.token_ids)
            if self._never(position, token):
                self.dry = True
                break
            self.token_ids.append(token)
            if logprobs:
                self._tail_logprobs.append(logprobs[kept])
            if self.opening.sends_probs:
                self._tail_probs.append(probs[kept] if probs else SparseProbs.certain(token))
            kept += 1
        self._compute_s += compute_s
        return kept

    def take_unsent(self, max_tokens: int = 2**31) -> Unsent | None:
        """What to tell the target now; each token is told once. None when there is nothing.

        An empty one says that the target need not wait for more.
        """
        start = self._next_unsent
        end = max(start, min(len(self.token_ids), self.limit, start + max_tokens))
        finished_here = end == len(self.token_ids)
        say_dry = finished_here and self.stuck and not self._dry_told and start == end
        if self.closed or (start == end and not say_dry):
            return None
        first = start - self.confirmed_len
        unsent = Unsent(
            start=start,
            tokens=self.token_ids[start:end],
            logprobs=self._tail_logprobs[first : end - self.confirmed_len],
            compute_s=self._compute_s,
            probs=self._tail_probs[first : end - self.confirmed_len],
        )
        self._next_unsent = end
        self._compute_s = 0.0
        self._dry_told = self._dry_told or say_dry
        return unsent

    @property
    def has_unsent(self) -> bool:
        """`take_unsent` would return something."""
        end = min(len(self.token_ids), self.limit)
        if self.closed:
            return False
        return self._next_unsent < end or (self.stuck and not self._dry_told)

    def _replace_from(self, position: int, tokens: Sequence[int]) -> None:
        """Drop the tail from `position` on, where the target went another way."""
        self.stable_len = min(self.stable_len, position)
        del self.token_ids[position:]
        self.token_ids.extend(tokens)
        self._tail_logprobs.clear()
        self._tail_probs.clear()
        self._next_unsent = len(self.token_ids)
        self._compute_s = 0.0

    def _stops_at(self, position: int, token: int) -> bool:
        opening = self.opening
        generated = position - opening.prompt_len
        return token in opening.stop_token_ids and generated >= opening.min_tokens

    def _never(self, position: int, token: int) -> bool:
        """The target would not choose `token` at `position` in any case."""
        opening = self.opening
        if opening.vocab_size and token >= opening.vocab_size:
            return True
        early = position - opening.prompt_len < opening.min_tokens
        return early and token in opening.stop_token_ids
