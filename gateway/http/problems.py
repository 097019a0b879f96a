"""What pydantic finds wrong with a request, in the words that this project's errors have.

Field and limit are named, and the value where it is short; never a whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from gateway.http.fields import NAMED
from gateway.http.json_body import spell
from outrider.serving.errors import InvalidRequest
from outrider.text import one_line

_MAX_VALUE_CHARS = 40

_Context = Mapping[str, Any]


def first_problem(error: ValidationError) -> InvalidRequest:
    """The first of what was found."""
    found = error.errors(include_url=False)[0]
    context: _Context = found.get("ctx", {})
    path = found["loc"]
    if found["type"] == NAMED:
        place = (*path, *context["name"])
        field = (*place, *context["theirs"])
        return InvalidRequest(spell(field), str(context["message"]), place=spell(place))
    say = _MESSAGES.get(found["type"])
    if say is None:
        return InvalidRequest(spell(path), found["msg"])
    message = say(context)
    if found["type"] in _ABOUT_A_VALUE:
        message += _got(found["input"])
    return InvalidRequest(spell(path), message)


def _got(value: object) -> str:
    if isinstance(value, list):
        return ", got a list"
    if isinstance(value, dict):
        return ", got an object"
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    if len(shown) > _MAX_VALUE_CHARS:
        shown = f"{shown[:_MAX_VALUE_CHARS]}..."
    return f", got {one_line(shown)}"


def _always(message: str) -> Callable[[_Context], str]:
    return lambda _: message


_LIMITS: dict[str, Callable[[_Context], str]] = {
    "greater_than": lambda context: f"must be above {context['gt']:g}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
}
_TYPES: dict[str, Callable[[_Context], str]] = {
    "bool_type": _always("must be true or false"),
    "dict_type": _always("must be an object"),
    "finite_number": _always("must be a finite number"),
    "float_type": _always("must be a number"),
    "int_type": _always("must be an integer"),
    "list_type": _always("must be a list"),
    "literal_error": lambda context: f"must be one of {context['expected']}",
    "model_type": _always("must be an object"),
    "string_type": _always("must be a string"),
}
_ABOUT_A_VALUE = _LIMITS.keys() | _TYPES.keys()
_MESSAGES = (
    _LIMITS
    | _TYPES
    | {
        "missing": _always("must be set"),
        "string_too_long": lambda context: f"at most {context['max_length']} characters",
        "string_too_short": _always("must not be empty"),
        "too_long": lambda context: f"at most {context['max_length']} entries",
        "too_short": _always("must not be empty"),
    }
)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
