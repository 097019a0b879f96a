"""Which tokens a model step forwards, and which blocks of the paged cache they use.

Pure policy. The sequence whose update is oldest comes first: it may take blocks from idle ones,
least recently used first, and then from younger ones, which are computed again when their turn
comes. So the oldest always moves, and as each update makes its sequence young, all become oldest.
Updates of one frame came at the same time: among them, who was opened first is the older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.proposers.base import PoolReport
from draft_service.sessions import Session
from outrider.engine.batch import BatchItem
from outrider.engine.block_pool import BlockPool

_SHORT = 32
"""Up to this many tokens are forwarded whole; longer shares are cut to what the budget leaves."""


@dataclass(slots=True)
class _Cached:
    """What the cache holds of one session."""

    opened: int
    """Counts the sessions that were opened before it."""
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One session's part of a step."""

    session: Session
    item: BatchItem
    tokens_before: list[int]
    """Every token before the one that is to be chosen; empty for a chunk that chooses none."""


class CachePlan:
    """The cache's bookkeeping for every session. One step at a time: plan, run, commit."""

    def __init__(self, pool: BlockPool, step_tokens: int, vocab_size: int) -> None:
        self._pool = pool
        self._step_tokens = step_tokens
        self._vocab_size = vocab_size
        self._cached: dict[Session, _Cached] = {}
        self._step = 0
        self._num_opened = 0

    def open(self, session: Session) -> None:
        """Nothing is held before the first step."""
        self._cached[session] = _Cached(self._num_opened)
        self._num_opened += 1

    def close(self, session: Session) -> None:
        """Blocks go back at once; a step that runs now may still write to them, none can be given
        away before it has ended."""
        self._pool.free(self._cached.pop(session).block_table)

    def plan(self, sessions: Sequence[Session]) -> list[Share]:
        """The shares of one step for sessions that want tokens.

        Empty only where the oldest does not fit into the whole pool.
        """
        self._step += 1
        for session in sessions:
            self._roll_back(session, session.settle())
        pending = {each: len(each.token_ids) - self._cached[each].num_computed for each in sessions}
        short = sum(count for count in pending.values() if count <= _SHORT)
        budget = self._step_tokens
        long_budget = max(_SHORT, budget - short)  # a long prefix never stops, and never stalls
        shares: list[Share] = []
        for session in sorted(sessions, key=self._age):
            count = min(pending[session], budget)
            if pending[session] > _SHORT:
                count = min(count, long_budget)
            if count == 0 or not self._make_room(session, count, shares):
                continue
            if pending[session] > _SHORT:
                long_budget -= count
            budget -= count
            shares.append(self._share(session, count))
        return shares

    def commit(self, share: Share) -> bool:
        """The step has run. True when the token chosen for this share still has its place."""
        session, item = share.session, share.item
        if session.closed:
            return False
        stable = session.settle()
        self._cached[session].num_computed = min(item.end, stable)
        untouched = stable >= item.end and len(session.token_ids) == item.end
        return untouched and item.num_logits > 0

    def report(self) -> PoolReport:
        """The pool, checked against every block table."""
        pool = self._pool
        held = sum(min(each.num_computed, self._slots(each)) for each in self._cached.values())
        return PoolReport(
            total=pool.num_blocks,
            free=pool.num_free,
            block_size=pool.block_size,
            wasted_slots=pool.num_used * pool.block_size - held,
            integrity_errors=tuple(
                pool.check_integrity(each.block_table for each in self._cached.values())
            ),
        )

    def _age(self, session: Session) -> tuple[float, int]:
        """Orders sessions, the oldest first; no two are equal."""
        return session.received_s, self._cached[session].opened

    def _slots(self, cached: _Cached) -> int:
        return len(cached.block_table) * self._pool.block_size

    def _roll_back(self, session: Session, stable_len: int) -> None:
        """Forget what was computed for tokens that have changed, and at least the last token."""
        cached = self._cached[session]
        # The last token is forwarded in any case: its logits choose the next one.
        known = min(cached.num_computed, stable_len, len(session.token_ids) - 1)
        cached.num_computed = known
        keep = self._pool.blocks_for(known)
        self._pool.free(cached.block_table[keep:])
        del cached.block_table[keep:]

    def _make_room(self, session: Session, count: int, shares: Sequence[Share]) -> bool:
        """Blocks for `count` more tokens of `session`, taken from others where none are free."""
        cached = self._cached[session]
        wanted = self._pool.blocks_for(cached.num_computed + count) - len(cached.block_table)
        missing = wanted - self._pool.num_free
        if missing > 0:
            victims = self._victims(session, {share.session for share in shares})
            if missing > sum(len(each.block_table) for each in victims):
                return False
            for victim in victims:
                self._evict(victim)
                if wanted <= self._pool.num_free:
                    break
        cached.block_table += self._pool.allocate(wanted)
        return True

    def _victims(self, session: Session, busy: set[Session]) -> list[_Cached]:
        """Whose blocks `session` may have, those first who miss them least."""
        idle, younger = [], []
        for other, cached in self._cached.items():
            if other is session or other in busy or not cached.block_table:
                continue
            if not other.wants_tokens:
                idle.append(other)
            elif self._age(other) > self._age(session):
                younger.append(other)
        idle.sort(key=lambda each: self._cached[each].last_step)
        younger.sort(key=self._age, reverse=True)
        return [self._cached[each] for each in idle + younger]

    def _evict(self, cached: _Cached) -> None:
        """Its tokens are computed again when it next wants some."""
        self._pool.free(cached.block_table)
        cached.block_table = []
        cached.num_computed = 0

    def _share(self, session: Session, count: int) -> Share:
        cached = self._cached[session]
        cached.last_step = self._step
        start = cached.num_computed
        end = start + count
        tokens = session.token_ids[start:end]
        chooses = end == len(session.token_ids)
        before = session.token_ids.copy() if chooses else []
        if session.opening.vocab_size > self._vocab_size:
            # The target's table is padded further than ours. Such ids say nothing to this model.
            tokens, before = self._known(tokens), self._known(before)
        item = BatchItem(tokens, start, cached.block_table.copy(), 1 if chooses else 0)
        return Share(session, item, before)

    def _known(self, token_ids: list[int]) -> list[int]:
        return [token if token < self._vocab_size else 0 for token in token_ids]
