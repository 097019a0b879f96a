"""Bytes of a request body to plain values: what JSON leaves open is refused.

No key twice, no NaN, no lone surrogate: two readers of such a body could understand two things.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from outrider.serving.errors import InvalidRequest
from outrider.text import is_text, one_line

BODY = "body"
"""The field of an error that lies in no field."""

_MAX_NAME_CHARS = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_HOLDS_STRINGS = (str, list, dict)

Path = tuple[str | int, ...]


def read_json(body: bytes) -> Any:
    """The value. Raises InvalidRequest, and nothing else, whatever the bytes are."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(BODY, f"is not UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidRequest(BODY, "is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(BODY, f"is not JSON: {error}") from error
    except ValueError as error:  # of int(): more digits than Python converts
        raise InvalidRequest(BODY, "holds a number with too many digits") from error
    if _SURROGATE_ESCAPE.search(text):
        _check_text(value)
    return value


def spell(path: Path) -> str:
    """The path of a field as errors name it, such as messages[3].role."""
    parts = []
    for part in path:
        if isinstance(part, int) or part.isdecimal():
            parts.append(f"[{part}]")
        else:
            name = one_line(part[:_MAX_NAME_CHARS].encode(errors="replace").decode())
            parts.append(f".{name}" if parts else name)
    return "".join(parts) or BODY


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(spell((name,)), "is given more than once", place=BODY)
            seen.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(BODY, f"is not JSON: {name} is no number there")


def _half_a_pair(path: Path) -> InvalidRequest:
    # Nobody knows yet which names on the way are fields.
    return InvalidRequest(spell(path), "holds half of a surrogate pair", place=BODY)


def _check_text(value: Any) -> None:
    """Raise for a string with half a surrogate pair: it cannot be written as UTF-8."""
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if not is_text(value):
                raise _half_a_pair(path)
        elif isinstance(value, list):
            waiting.extend(
                ((*path, index), each)
                for index, each in enumerate(value)
                if isinstance(each, _HOLDS_STRINGS)
            )
        elif isinstance(value, dict):
            for name, each in value.items():
                if not is_text(name):
                    raise _half_a_pair((*path, name))
                waiting.append(((*path, name), each))
