"""Whether a drafter still answers: what it owes, since when, and whether steps waited in vain."""

from __future__ import annotations

import time

_SILENCE_S = 1.0
"""Asked for tokens this long ago and heard nothing: steps no longer wait for this drafter."""
_FORGIVEN_AFTER_S = 3.0
"""After a wait in vain, with no sequence left that asks: then it may have the next one."""


class Silence:
    """One drafter's, from the target's end."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # sequence id: since when, the oldest first
        self._waited_in_vain = False
        self._silent_since: float | None = None  # a step waited, nothing has come

    @property
    def lasts(self) -> bool:
        """It was asked for something, or waited for, and has been silent for long."""
        now = time.monotonic()
        # Sequences that have given up on it no longer ask, which makes it no less silent.
        # With nothing asked of it any more it cannot speak up, so it gets another chance in time.
        vain = self._silent_since
        if vain is None or (not self._asked and now - vain > _FORGIVEN_AFTER_S):
            vain = now
        since = min(vain, next(iter(self._asked.values()), now))
        return now - since > _SILENCE_S

    @property
    def makes_waiting_vain(self) -> bool:
        """A step has waited for it already, and it still owes an answer."""
        return self._waited_in_vain and bool(self._asked)

    def asked(self, sequence_id: int, now_s: float) -> None:
        """It was told that this sequence wants tokens."""
        self._asked.setdefault(sequence_id, now_s)

    def released(self, sequence_id: int) -> None:
        """It owes this sequence no answer any more."""
        self._asked.pop(sequence_id, None)

    def heard(self) -> None:
        """It has said something."""
        self._asked.clear()
        self._silent_since, self._waited_in_vain = None, False

    def note_vain_wait(self) -> None:
        """A step waited to its deadline. If nothing at all came since the drafter was asked, no
        further step waits until something does: a drafter that is gone costs one wait."""
        self._waited_in_vain = bool(self._asked)
        if self._asked and self._silent_since is None:
            self._silent_since = time.monotonic()
