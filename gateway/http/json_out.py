"""JSON of answers: values on one line, and objects that grow while the answer comes into being."""

from __future__ import annotations

import json
from collections.abc import Mapping


def to_json(value: object) -> bytes:
    """On one line, so that it can be the data of an event."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def with_members(value: Mapping[str, object], **members: bytes) -> bytes:
    """An object that has something already, with members that are JSON already."""
    more = b",".join(b'"%b":%b' % (name.encode(), member) for name, member in members.items())
    return b"%b,%b}" % (to_json(value)[:-1], more)


def list_of(values: list[bytes]) -> bytes:
    """Of values that are JSON already."""
    return b"[%b]" % b",".join(values)


class GrowingObject:
    """An object whose lists get longer with each piece.

    Log-probabilities of a long answer are megabytes: made in one go they would hold up the event
    loop, and with it everybody else, for seconds.
    """

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}
        self._others: dict[str, bytes] = {}

    def add(self, piece: Mapping[str, object]) -> None:
        """Its lists go on where those before end; anything else takes the place of what was."""
        for name, value in piece.items():
            if not isinstance(value, list):
                self._others[name] = to_json(value)
                continue
            values = self._lists.setdefault(name, [])
            if value:
                values.append(to_json(value)[1:-1])

    def json(self) -> bytes:
        """All of it."""
        members = {name: list_of(values) for name, values in self._lists.items()} | self._others
        parts = [b'"%b":%b' % (name.encode(), member) for name, member in members.items()]
        return b"{%b}" % b",".join(parts)
