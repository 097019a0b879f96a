"""Whether a drafter still answers: what it owes, since when, and whether steps waited in vain."""

from __future__ import annotations

import math
import time

_SILENCE_S = 1.0
"""Asked for tokens this long ago and heard nothing: steps no longer wait for this drafter."""
_FORGIVEN_AFTER_S = 3.0
"""With no sequence left that asks a silent drafter: then it may have the next one."""


class Silence:
    """One drafter's, from the target's end."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # sequence id: since when, the oldest first
        self._unasked_since = -math.inf
        self._waited_since: float | None = None  # a step waited in vain, nothing has come

    @property
    def lasts(self) -> bool:
        """It was asked for something, or waited for, and has been silent for long."""
        now = time.monotonic()
        # Sequences that have given up on it no longer ask, which makes it no less silent.
        since = min(self._waited_since or now, next(iter(self._asked.values()), now))
        return now - since > _SILENCE_S

    @property
    def forgiven(self) -> bool:
        """Nobody has asked it for a while, so it could not speak up: it gets another chance."""
        return not self._asked and time.monotonic() - self._unasked_since > _FORGIVEN_AFTER_S

    @property
    def makes_waiting_vain(self) -> bool:
        """A step has waited for it already. Windows that pause owe nothing, and yet the wait for
        the next probe would be as vain; the answer to a probe ends this without any wait."""
        return self._waited_since is not None

    def asked(self, sequence_id: int, now_s: float) -> None:
        """It was told that this sequence wants tokens."""
        self._asked.setdefault(sequence_id, now_s)

    def released(self, sequence_id: int) -> None:
        """It owes this sequence no answer any more."""
        if self._asked.pop(sequence_id, None) is not None and not self._asked:
            self._unasked_since = time.monotonic()

    def heard(self) -> None:
        """It has said something."""
        self._asked.clear()
        self._waited_since = None

    def note_vain_wait(self) -> None:
        """A step waited to its deadline. If nothing at all came since the drafter was asked, no
        further step waits until something does: a drafter that is gone costs one wait."""
        if self._asked and self._waited_since is None:
            self._waited_since = time.monotonic()
