"""Stop strings in a stream of text, wherever its pieces are cut.

The match that begins earliest in the generated text wins, the shortest of those that begin there.
Text is held only while it is the beginning of some stop string, so at most (longest stop - 1)
characters wait. Knows nothing of tokens; the prompt never comes by here.

    given out │ held: a proper prefix of some stop │ not generated yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What one piece of text led to."""

    text: str
    """May be given to the client."""
    matched: str | None = None
    """The stop string that ended the text."""


class StopMatcher:
    """Finds the first stop string of one text. After a match it must not be fed again."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop` leaves the stop string itself in the text."""
        self._stops = sorted(set(stops), key=len)  # shortest first
        self._first_chars = {stop[0] for stop in self._stops}
        self._include_stop = include_stop
        self._held = ""
        # Held characters that came before stops counted: a match must end behind them.
        self._exempt = 0

    def feed(self, text: str, *, counts: bool = True) -> Scan:
        """Go on with `text`. A stop that ends in text which does not count is no match."""
        if not self._stops:
            return Scan(text)
        buffer = self._held + text
        if not counts:
            self._exempt = len(buffer)
        for start, char in enumerate(buffer):
            if char not in self._first_chars:
                continue
            matched = self._match_at(buffer, start)
            if matched is not None:
                return self._ended(buffer, start, matched)
            rest = buffer[start:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return self._hold(buffer, start)
        return self._hold(buffer, len(buffer))

    def finish(self) -> Scan:
        """No more text will come: a longer stop cannot complete, a shorter one inside it counts."""
        buffer, self._held = self._held, ""
        for start in range(len(buffer)):
            matched = self._match_at(buffer, start)
            if matched is not None:
                return self._ended(buffer, start, matched)
        return Scan(buffer)

    def _match_at(self, buffer: str, start: int) -> str | None:
        for stop in self._stops:
            if start + len(stop) > self._exempt and buffer.startswith(stop, start):
                return stop
        return None

    def _hold(self, buffer: str, start: int) -> Scan:
        self._held = buffer[start:]
        self._exempt = max(0, self._exempt - start)
        return Scan(buffer[:start])

    def _ended(self, buffer: str, start: int, matched: str) -> Scan:
        self._held = ""
        end = start + len(matched) if self._include_stop else start
        return Scan(buffer[:end], matched)
