"""A drafter reduced to the protocol's rules, without streams or time, for tests of the target.

It keeps what agrees with its tail, drops the rest, and sends each token once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from target_service.draft_link import Update
from target_service.draft_tail import ProposedTokens


class HonestDrafter:
    """One sequence. `guess(prefix)` is what it thinks comes next, None if it has no idea."""

    def __init__(self, guess: Callable[[Sequence[int]], int | None]) -> None:
        self._guess = guess
        self.epoch = 0
        self.update_seq = 0
        self.token_ids: list[int] = []
        self.confirmed_len = 0
        self.window = 0
        self.finished = False
        self._next_unsent = 0
        self._silent = False

    @property
    def confirmed(self) -> list[int]:
        """The tokens that it was told of."""
        return self.token_ids[: self.confirmed_len]

    def apply(self, update: Update) -> None:
        """Take in an update; anything but the next one is an error of the target."""
        assert update.update_seq == self.update_seq + 1
        self.update_seq = update.update_seq
        if update.finished:
            assert update.facts is None and not update.tokens and update.window == 0
            self.finished = True
            return
        assert not self.finished
        assert (update.facts is not None) == (update.base_len == 0)
        if update.epoch != self.epoch:
            assert update.epoch > self.epoch and update.base_len == 0
            self.epoch = update.epoch
            self.token_ids, self.confirmed_len, self._next_unsent = [], 0, 0
        assert update.base_len == self.confirmed_len
        end = self.confirmed_len + len(update.tokens)
        known = self.token_ids[self.confirmed_len : end]
        if known != update.tokens[: len(known)]:
            self.token_ids = self.confirmed + update.tokens
            self._next_unsent = end
        elif len(known) < len(update.tokens):
            self.token_ids = self.confirmed + update.tokens
        self.confirmed_len = end
        self._next_unsent = max(self._next_unsent, end)
        self.window = update.window
        self._silent = False

    def draft(self, max_tokens: int) -> ProposedTokens | None:
        """Up to `max_tokens` more, within the window; once without tokens if it has no idea."""
        tokens = []
        limit = self.confirmed_len + self.window
        while len(tokens) < max_tokens and len(self.token_ids) < limit and not self._silent:
            token = self._guess(self.token_ids)
            if token is None:
                self._silent = True
                return self._proposal(tokens)
            self.token_ids.append(token)
            tokens.append(token)
        return self._proposal(tokens) if tokens else None

    def _proposal(self, tokens: list[int]) -> ProposedTokens:
        start, self._next_unsent = self._next_unsent, self._next_unsent + len(tokens)
        return ProposedTokens(self.epoch, self.confirmed_len, start, tokens)
