"""A service's log lines for people: JSON made readable, anything else as it is."""

from __future__ import annotations

import json

import click

LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


def readable(line: str) -> str:
    """`level  event  key=value ...`, and the traceback below when there is one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    level = str(entry.pop("level", ""))
    event = entry.pop("event")
    trace = entry.pop("exception", None)
    for known in ("timestamp", "service"):
        entry.pop(known, None)
    rest = " ".join(f"{key}={value}" for key, value in entry.items())
    shown = f"{level:<8}"
    if level in LEVEL_COLOURS:
        shown = click.style(shown, fg=LEVEL_COLOURS[level])
    text = f"{shown}{event}  {rest}".rstrip()
    return f"{text}\n{trace}" if trace else text
