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

STEP_TOKENS = 4096
"""Most tokens that a step adds to indexes: about 10 ms, in which the event loop stands still."""

_ID_BITS = 32


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
        """Fill windows, or mark sessions dry; a long text is indexed in the course of steps."""
        changed = []
        room = STEP_TOKENS
        # Those that are nearly done first, so that a long prompt holds nobody up.
        for session in sorted(sessions, key=self._num_unindexed):
            index = self._indexes[session]
            end = min(session.confirmed_len, index.num_tokens + room)
            room -= end - index.num_tokens
            index.add(session.token_ids, end)
            if end < session.confirmed_len:
                break
            position = index.find(session.token_ids)
            if position is None:
                session.dry = True
            else:
                session.extend(continuation(session.token_ids, position, session.room))
            changed.append(session)
        if room == 0:
            await asyncio.sleep(0)  # the next step comes at once: streams have their turn before
        return changed

    def _num_unindexed(self, session: Session) -> int:
        return session.confirmed_len - self._indexes[session].num_tokens

    def pool(self) -> PoolReport | None:
        """It has no cache."""
        return None

    def shutdown(self) -> None:
        """Nothing runs behind it."""
