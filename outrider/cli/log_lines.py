"""A service's log lines for people: JSON made readable, anything else as it is."""

from __future__ import annotations

import json
from typing import Any

import click

from outrider.text import indented, one_line, one_word

LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


def entry_of(line: str) -> dict[str, Any] | None:
    """What a line of our logs says; None for any other line."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None


def readable(line: str) -> str:
    """`level  event  key=value ...`, and the traceback below when there is one.

    Whatever the values are, it is one line and the traceback's are indented.
    """
    entry = entry_of(line)
    if entry is None:
        return one_line(line)
    level = str(entry.pop("level", ""))
    event = entry.pop("event")
    trace = entry.pop("exception", None)
    for known in ("timestamp", "service"):
        entry.pop(known, None)
    rest = " ".join(f"{key}={one_word(value)}" for key, value in entry.items())
    shown = one_line(f"{level:<8}")
    if level in LEVEL_COLOURS:
        shown = click.style(shown, fg=LEVEL_COLOURS[level])
    text = shown + one_line(f"{event}  {rest}".rstrip())
    return f"{text}\n{indented(trace)}" if trace else text
