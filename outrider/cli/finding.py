"""One thing that `outrider doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well as it could
    PROBLEM = "problem"  # will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, in words, and what to do about it."""

    topic: str
    level: Level
    text: str
    advice: str = ""
    """Empty when there is nothing to do."""


def ok(topic: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(topic, Level.OK, text)


def warning(topic: str, text: str, advice: str) -> Finding:
    """It works, but."""
    return Finding(topic, Level.WARNING, text, advice)


def problem(topic: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(topic, Level.PROBLEM, text, advice)
