"""What one message of a chat says: a string, or parts of text that are put together as they are.

Parts are looked at one by one and by hand: a body has room for a hundred thousand of them, and a
model of pydantic's for each would hold up everybody else for a second.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from gateway.http.fields import Neutral, check_neutral, problem, unsupported_properties

_UNSUPPORTED: dict[str, Neutral] = {
    "image_url": (None,),
    "input_audio": (None,),
    "file": (None,),
    "refusal": (None,),
}
_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "text", "description": "Other kinds are not supported."},
        "text": {"type": "string"},
        **unsupported_properties(_UNSUPPORTED),
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise problem("must be a string or a list of text parts")
    if not value:
        raise problem("must not be empty")
    return "".join([_text_of_part(part, index) for index, part in enumerate(value)])


def _text_of_part(part: object, index: int) -> str:
    if not isinstance(part, dict):
        raise problem("must be an object", index)
    for name, given in part.items():
        if name in _UNSUPPORTED:
            check_neutral(given, _UNSUPPORTED[name], index, name)
        elif name not in ("type", "text"):
            raise problem("is not a field that is known here", index, theirs=name)
    if "type" not in part:
        raise problem("must be set", index, "type")
    if part["type"] != "text":
        raise problem("must be 'text'", index, "type")
    if "text" not in part:
        raise problem("must be set", index, "text")
    text = part["text"]
    if not isinstance(text, str):
        raise problem("must be a string", index, "text")
    return text


Content = Annotated[
    str,
    PlainValidator(_text_of),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}
    ),
]
