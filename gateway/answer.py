"""One choice on its way to the client: tokens become text, stop strings end it.

Works token by token, so the text and the place of the stop are the same however the target groups
its tokens, with drafts or without. Knows nothing of gRPC.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.stops import StopMatcher
from outrider.params import StoppingParams


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens led to."""

    text: str
    num_tokens: int
    """How many of them belong to the answer; the others came after a stop string."""
    stopped: bool
    """A stop string has ended the choice."""


class Answer:
    """The text of one choice. After a piece that stopped, or `finish`, it is complete."""

    def __init__(
        self, detokenizer: Detokenizer, stopping: StoppingParams, eos_token_ids: Collection[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stopping.stop, stopping.include_stop)
        self._min_tokens = stopping.min_tokens
        # Their text is not part of the answer, as that of a stop string is not.
        silent = set() if stopping.include_stop else set(stopping.stop_token_ids)
        self._silent = frozenset(silent if stopping.ignore_eos else silent | set(eos_token_ids))
        self.num_tokens = 0
        """Tokens taken so far."""

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take tokens up to the one that completes a stop string."""
        parts = []
        for index, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            text = "" if token_id in self._silent else self._detokenizer.push(token_id)
            scan = self._matcher.feed(text, counts=self.num_tokens >= self._min_tokens)
            parts.append(scan.text)
            if scan.matched is not None:
                return Piece("".join(parts), index, stopped=True)
        return Piece("".join(parts), len(token_ids), stopped=False)

    def finish(self) -> Piece:
        """No more tokens: what waited, unless it still holds a stop string."""
        tail = self._matcher.feed(self._detokenizer.flush())
        if tail.matched is not None:
            return Piece(tail.text, 0, stopped=True)
        rest = self._matcher.finish()
        return Piece(tail.text + rest.text, 0, stopped=rest.matched is not None)
