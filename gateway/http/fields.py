"""What the objects of a request are made of: strict types, and fields that may only say nothing.

A field of OpenAI's that this gateway cannot honour is taken at the values that ask for nothing,
and refused by name at all others. So is any field that nobody knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from outrider.params import MAX_LOGIT_BIAS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

MAX_UINT32 = 2**32 - 1
NAMED = "named"
"""Type of our own errors; their context holds `message`, and `name` for a field further in.

Behind it, in `theirs`, stands a name that the client made up: it is told that, and no log is.
"""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

Neutral = tuple[object, ...]


def problem(message: str, *name: str | int, theirs: str | None = None) -> PydanticCustomError:
    """To raise in a validator. `name` leads on from the value that is being validated."""
    made_up = () if theirs is None else (theirs,)
    context = {"message": message, "name": name, "theirs": made_up}
    return PydanticCustomError(NAMED, "{message}", context)


class RequestObject(BaseModel):
    """An object that takes no field but its own, and no value but of the very type."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    unsupported: ClassVar[Mapping[str, Neutral]] = {}
    """Fields that the gateway cannot honour, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_says_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {}
        for name, given in value.items():
            if name in cls.unsupported:
                check_neutral(given, cls.unsupported[name], name)
            elif name in cls.model_fields:
                known[name] = given
            else:  # here, because pydantic would collect all of them first
                raise problem("is not a field that is known here", theirs=name)
        return known

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Puts the unsupported fields into the JSON schema."""
        cls.model_config["json_schema_extra"] = cls._add_unsupported

    @classmethod
    def _add_unsupported(cls, schema: JsonDict) -> None:
        properties = schema.setdefault("properties", {})
        assert isinstance(properties, dict)
        properties.update(unsupported_properties(cls.unsupported))


def unsupported_properties(unsupported: Mapping[str, Neutral]) -> JsonDict:
    """Their JSON schemas."""
    return {
        name: {
            "enum": list(neutral),  # type: ignore[arg-type]  # they are JSON
            "description": "Not supported: only values that ask for nothing are taken.",
        }
        for name, neutral in unsupported.items()
    }


def check_neutral(given: object, neutral: Neutral, *name: str | int) -> None:
    """Raise for a value that asks for something."""
    # The types too: True == 1.
    if any(type(given) is type(each) and given == each for each in neutral):
        return
    others = " or ".join(json.dumps(each) for each in neutral if each is not None)
    raise problem("is not supported" + (f", except as {others}" if others else ""), *name)


def _list_of_stops(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise problem("must be a string or a list of strings")
    return value


def _ids_of_logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise problem("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise problem(f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    for name in value:
        if not (_TOKEN_ID.fullmatch(name) and int(name) <= MAX_UINT32):
            raise problem("its keys must be token ids in decimal digits", theirs=name)
    return {int(name): each for name, each in value.items()}


def _one_prompt(value: object) -> str | Sequence[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    elif isinstance(value, list) and value and isinstance(value[0], str | list):
        raise problem(f"only one prompt a request is supported, got {len(value)}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise problem("must be a string or a list of token ids")
    # True is an int as well. The usual case is quick: there may be a million of them.
    if set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) <= MAX_UINT32)
    ):
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise problem("must be a token id", index)
        if not 0 <= token_id <= MAX_UINT32:
            raise problem(f"must be at least 0 and at most {MAX_UINT32}", index)
    return value


_STRING = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_UINT32}}
_STOP = _STRING | {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}

TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(_list_of_stops),
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}
    ),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_ids_of_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
Prompt = Annotated[
    str | Sequence[int],
    PlainValidator(_one_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING | {"minLength": 1},
                _TOKEN_IDS | {"minItems": 1},
                {
                    "type": "array",
                    "items": {"anyOf": [_STRING | {"minLength": 1}, _TOKEN_IDS | {"minItems": 1}]},
                    "minItems": 1,
                    "maxItems": 1,
                },
            ]
        }
    ),
]
