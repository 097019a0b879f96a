"""A service's log lines for people: JSON made readable, anything else as it is."""

from __future__ import annotations

import json

import click

from outrider.text import indented, one_line, one_word

LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


def readable(line: str) -> str:
    """`level  event  key=value ...`, and the traceback below when there is one.

    Whatever the values are, it is one line and the traceback's are indented.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return one_line(line)
    if not isinstance(entry, dict) or "event" not in entry:
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
