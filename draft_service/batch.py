"""The one loop: sequences that want tokens go in, proposer steps run, streams are told.

Knows nothing of how tokens are found or how frames look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from draft_service.proposers.base import Proposer
from draft_service.sessions import Session


class DraftLoop:
    """Runs one proposer for the sequences of every stream."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._wanting: dict[Session, Callable[[Session], None]] = {}
        self._wake = asyncio.Event()
        self.last_step_s = 0.0
        self.compute_s = 0.0

    @property
    def queue_len(self) -> int:
        """Sequences that want tokens now."""
        return len(self._wanting)

    def offer(self, session: Session, tell: Callable[[Session], None]) -> None:
        """`session` has changed; `tell` is called whenever it has something to say."""
        if session.wants_tokens:
            self._wanting[session] = tell
            self._wake.set()
        else:
            self._wanting.pop(session, None)

    def withdraw(self, session: Session) -> None:
        """`session` has ended."""
        self._wanting.pop(session, None)

    async def run(self) -> None:
        """Step for ever; ends only with the proposer's exception or by being cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._wanting:
                await self._step()

    async def _step(self) -> None:
        started_s = time.monotonic()
        tellers = dict(self._wanting)
        for session in await self._proposer.propose(list(tellers)):
            tellers[session](session)
        for session in tellers:
            if not session.wants_tokens:
                self._wanting.pop(session, None)
        self.last_step_s = time.monotonic() - started_s
        self.compute_s += self.last_step_s
