"""The one loop: sequences that want tokens go in, proposer steps run, streams are told.

A step that fails is tried again with one sequence at a time, so that only those pay for whom it
fails; the loop ends when steps fail for everybody, several times in a row. Knows nothing of how
tokens are found or how frames look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from draft_service.proposers.base import Proposer
from draft_service.sessions import Session
from outrider.serving.errors import EngineFailed

log = structlog.get_logger(__name__)

_MAX_FAILED_STEPS = 3
"""After so many steps in a row that failed for each sequence, it is not the sequences."""


class Listener(Protocol):
    """Who brought a sequence."""

    def tell(self, session: Session) -> None:
        """It may have something to say."""

    def drop(self, session: Session) -> None:
        """A step fails with it: it gets no more drafts."""


class DraftLoop:
    """Runs one proposer for the sequences of every stream."""

    def __init__(
        self, proposer: Proposer, on_step: Callable[[int, float], None] | None = None
    ) -> None:
        """`on_step(sequences, seconds)` is called behind each step."""
        self._proposer = proposer
        self._on_step = on_step
        self._wanting: dict[Session, Listener] = {}
        self._wake = asyncio.Event()
        self._num_failed_steps = 0  # in a row, for everybody
        self.last_step_s = 0.0
        self.compute_s = 0.0

    @property
    def queue_len(self) -> int:
        """Sequences that want tokens now."""
        return len(self._wanting)

    def offer(self, session: Session, listener: Listener) -> None:
        """`session` has changed; `listener` hears whenever it has something to say."""
        if session.wants_tokens:
            self._wanting[session] = listener
            self._wake.set()
        else:
            self._wanting.pop(session, None)

    def withdraw(self, session: Session) -> None:
        """`session` has ended."""
        self._wanting.pop(session, None)

    async def run(self) -> None:
        """Step for ever; ends only with EngineFailed or by being cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._wanting:
                await self._step()

    async def _step(self) -> None:
        started_s = time.monotonic()
        wanting = dict(self._wanting)
        try:
            changed = await self._proposer.propose(list(wanting))
        except Exception as error:
            log.error("a step failed", sequences=len(wanting), exc_info=error)
            await self._step_one_by_one(wanting, error)
        else:
            self._num_failed_steps = 0
            for session in changed:
                wanting[session].tell(session)
        for session in wanting:
            if not session.wants_tokens:
                self._wanting.pop(session, None)
        self.last_step_s = time.monotonic() - started_s
        self.compute_s += self.last_step_s
        if self._on_step is not None:
            self._on_step(len(wanting), self.last_step_s)

    async def _step_one_by_one(self, wanting: Mapping[Session, Listener], error: Exception) -> None:
        """Find out for whom a step fails, and go on without them."""
        tried = failed = 0
        for session, listener in wanting.items():
            if not session.wants_tokens:  # it has changed or ended meanwhile
                continue
            tried += 1
            try:
                if len(wanting) == 1:
                    raise error
                changed = await self._proposer.propose([session])
            except Exception as reason:
                failed += 1
                log.warning("a sequence gets no drafts", reason=str(reason))
                listener.drop(session)
            else:
                for each in changed:
                    listener.tell(each)
        if failed < tried:
            self._num_failed_steps = 0
        elif tried:
            self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise EngineFailed(f"{_MAX_FAILED_STEPS} steps failed in a row: {error}") from error
