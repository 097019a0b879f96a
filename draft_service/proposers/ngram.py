"""Proposes what followed the last time: the longest suffix that occurred before, most recent first.

No weights. Each sequence has an index of its confirmed tokens, which never change within an epoch,
so a rejected tail leaves nothing to undo and an update costs O(new tokens).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from draft_service.proposers.base import PoolReport, ProposerIdentity
from draft_service.sessions import Session
from outrider.serving.settings import SettingsError

MAX_LEN = 131_072
"""Tokens of one sequence: as long as today's contexts."""

_ID_BITS = 32
_YIELD_AFTER_TOKENS = 4096  # indexed in one go before other work of the event loop gets its turn


class NgramIndex:
    """Where each n-gram of a growing sequence ended last, with a token behind it."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._masks = [(1 << (_ID_BITS * size)) - 1 for size in self._sizes]
        self._next_position: list[dict[int, int]] = [{} for _ in self._sizes]
        self._key = 0  # the last `longest` tokens, one after another in one integer
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], end: int) -> None:
        """Take `token_ids[num_tokens:end]`; those before are known."""
        key = self._key
        tables = list(zip(self._sizes, self._masks, self._next_position, strict=True))
        whole = self._masks[-1]
        for position in range(self.num_tokens, end):
            # The n-grams that end just before `position` are followed by it.
            for size, mask, table in tables:
                if size > position:
                    break
                table[key & mask] = position
            key = ((key << _ID_BITS) | token_ids[position]) & whole
        self._key = key
        self.num_tokens = end

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The position behind the latest occurrence of the longest suffix of `token_ids`."""
        longest = min(self._sizes[-1], len(token_ids))
        key = 0
        for token in token_ids[len(token_ids) - longest :]:
            key = (key << _ID_BITS) | token
        for size, mask, table in zip(
            reversed(self._sizes), reversed(self._masks), reversed(self._next_position), strict=True
        ):
            position = table.get(key & mask) if size <= longest else None
            if position is not None:
                return position
        return None


def continuation(token_ids: Sequence[int], position: int, count: int) -> list[int]:
    """`count` tokens from `position` on; behind the end it goes on with its own tokens.

    A text that repeats itself with period d is so continued with period d, however far.
    """
    distance = len(token_ids) - position
    found: list[int] = []
    for i in range(count):
        found.append(token_ids[position + i] if i < distance else found[i - distance])
    return found


class NgramProposer:
    """Prompt lookup for many sequences; each one sees its own tokens only."""

    def __init__(self, shortest: int, longest: int) -> None:
        if shortest > longest:
            raise SettingsError(f"ngram_min must be at most ngram_max ({longest}), got {shortest}")
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[Session, NgramIndex] = {}

    @property
    def identity(self) -> ProposerIdentity:
        """It matches every token table."""
        return ProposerIdentity(proposer="ngram", max_len=MAX_LEN)

    def open(self, session: Session) -> None:
        """Start an empty index."""
        self._indexes[session] = NgramIndex(self._shortest, self._longest)

    def close(self, session: Session) -> None:
        """Drop the index."""
        del self._indexes[session]

    async def propose(self, sessions: Sequence[Session]) -> list[Session]:
        """Fill the window of every session at once, or mark it dry."""
        changed = []
        indexed = 0
        for session in sessions:
            if indexed > _YIELD_AFTER_TOKENS:
                indexed = 0
                await asyncio.sleep(0)
            if not session.wants_tokens:
                continue
            index = self._indexes[session]
            indexed += session.confirmed_len - index.num_tokens
            index.add(session.token_ids, session.confirmed_len)
            position = index.find(session.token_ids)
            if position is None:
                session.dry = True
            else:
                session.extend(continuation(session.token_ids, position, session.room))
            changed.append(session)
        return changed

    def pool(self) -> PoolReport | None:
        """It has no cache."""
        return None

    def shutdown(self) -> None:
        """Nothing runs behind it."""
