"""Request bodies: whatever comes, it becomes a request or an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Speculation,
    StreamOptions,
)
from gateway.http.to_request import ParsedRequest, parse_chat, parse_completion
from gateway.requests import check_generate
from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest

Parse = Callable[[bytes], ParsedRequest]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
BOTH = pytest.mark.parametrize(
    ("parse", "base"), [(parse_chat, CHAT), (parse_completion, COMPLETION)], ids=["chat", "text"]
)
VOCAB_SIZE = 512

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))  # lone surrogates too
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=12,
)


def refusal(parse: Parse, body: bytes | dict[str, Any]) -> InvalidRequest:
    """The error that a body leads to."""
    with pytest.raises(InvalidRequest) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def parse_or_refuse(parse: Parse, body: bytes) -> None:
    """Any other exception fails the test; what is parsed and what is refused can be sent."""
    try:
        parsed = parse(body)
    except InvalidRequest as error:
        assert error.field and error.message
        str(error).encode()
    else:
        parsed.request.SerializeToString()


@given(st.binary() | st.text().map(str.encode))
@settings(deadline=None)
def test_any_bytes(body: bytes) -> None:
    """No bytes lead to another exception."""
    for parse in (parse_chat, parse_completion):
        parse_or_refuse(parse, body)


@given(_values)
@settings(deadline=None)
def test_any_json(value: object) -> None:
    """No JSON leads to another exception."""
    for parse in (parse_chat, parse_completion):
        parse_or_refuse(parse, json.dumps(value).encode())


def _fields(kind: type[GenerationRequest]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(sorted({*kind.model_fields, *kind.unsupported, "role", "x"}))
    inner = st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "mode", "include_usage", "7", "x"]),
        _values | st.sampled_from(["user", "text", "auto"]),
    )
    return st.dictionaries(names, _values | inner | st.lists(inner, max_size=3), max_size=4)


@BOTH
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_any_value_of_any_field(parse: Parse, base: dict[str, Any], data: st.DataObject) -> None:
    """A good request with some fields replaced by anything is parsed or refused."""
    kind = ChatRequest if parse is parse_chat else CompletionRequest
    parse_or_refuse(parse, json.dumps(base | data.draw(_fields(kind))).encode())


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b"", "body", "is not JSON"),
        (b'{"model": "m"', "body", "is not JSON"),
        (b"[]", "body", "must be an object, got a list"),
        (b"null", "body", "must be an object, got null"),
        (b'"\xff"', "body", "is not UTF-8 at byte 1"),
        (b'\xef\xbb\xbf{"model":"m"}', "body", "is not JSON"),
        ('{"model":"m"}'.encode("utf-16"), "body", "is not UTF-8"),
        (b"[" * 100_000, "body", "is nested too deeply"),
        (b'{"a":' * 100_000, "body", "is nested too deeply"),
        (b'{"seed":' + b"1" * 10_000 + b"}", "body", "too many digits"),
        (b'{"temperature":NaN}', "body", "NaN is no number"),
        (b'{"temperature":-Infinity}', "body", "-Infinity is no number"),
        (b'{"top_p":1,"top_p":0.5}', "top_p", "is given more than once"),
        (b'{"model":"\\ud800"}', "model", "half of a surrogate pair"),
        (b'{"stop":["a","b\\uDC00"]}', "stop[1]", "half of a surrogate pair"),
        (b'{"logit_bias":{"\\udfff":1}}', "logit_bias.?", "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_is_no_json(parse: Parse, body: bytes, field: str, message: str) -> None:
    """JSON's own rules, and those that JSON leaves open, are kept strictly."""
    error = refusal(parse, body)
    assert error.field == field
    assert message in error.message


def test_a_surrogate_pair_is_a_character() -> None:
    """Escaped pairs, as many clients write every emoji, are text."""
    body = b'{"model":"m","prompt":"\\ud83d\\udc68","stop":"\\u00e9"}'
    request = parse_completion(body).request
    assert (request.text, list(request.stopping.stop)) == ("\U0001f468", ["é"])


WRONG_TYPES = [
    ("model", 1, "must be a string, got 1"),
    ("model", None, "must be a string, got null"),
    ("model", "", "must not be empty"),
    ("stream", 1, "must be true or false, got 1"),
    ("stream", "true", "must be true or false, got 'true'"),
    ("stream_options", True, "must be an object, got true"),
    ("n", True, "must be an integer, got true"),
    ("n", "2", "must be an integer, got '2'"),
    ("n", 1.5, "must be an integer, got 1.5"),
    ("temperature", "0.5", "must be a number, got '0.5'"),
    ("temperature", True, "must be a number, got true"),
    ("temperature", [0.5], "must be a number, got a list"),
    ("temperature", 10**400, "must be a number, got 1000"),
    ("stop", 5, "must be a string or a list of strings"),
    ("stop", ["a"] * 17, "at most 16 entries"),
    ("stop", [["a"]], "must be a string, got a list"),
    ("stop", [""], "must not be empty"),
    ("stop", ["a" * 513], "at most 512 characters"),
    ("stop_token_ids", [1, -1], "must be at least 0, got -1"),
    ("stop_token_ids", [0] * 65, "at most 64 entries"),
    ("logit_bias", [1], "must be an object of token ids and numbers"),
    ("logit_bias", {"x": 1}, "its keys must be token ids in decimal digits"),
    ("logit_bias", {"01": 1}, "its keys must be token ids in decimal digits"),
    ("logit_bias", {"٣": 1}, "its keys must be token ids in decimal digits"),
    ("logit_bias", {"4294967296": 1}, "its keys must be token ids in decimal digits"),
    ("logit_bias", {str(i): 0 for i in range(1025)}, "at most 1024 entries, got 1025"),
    ("logit_bias", {"5": "1"}, "must be a number, got '1'"),
    ("user", "a" * 513, "at most 512 characters"),
    ("ignore_eos", "no", "must be true or false, got 'no'"),
    ("speculation", "off", "must be an object, got 'off'"),
    ("speculation", {"mode": "on"}, "must be one of 'auto', 'off' or 'fixed', got 'on'"),
    ("speculation", {"k": 1}, "is not a field that is known here"),
]


@BOTH
@pytest.mark.parametrize(("field", "value", "message"), WRONG_TYPES)
def test_values_of_another_type(
    parse: Parse, base: dict[str, Any], field: str, value: object, message: str
) -> None:
    """Nothing is taken for what it is not: field, limit and short values are named."""
    error = refusal(parse, base | {field: value})
    assert error.field.startswith(field)
    assert message in error.message


@BOTH
def test_null_is_left_out(parse: Parse, base: dict[str, Any]) -> None:
    """Null in every field that can be left out gives the same request as leaving them out."""
    kind = ChatRequest if parse is parse_chat else CompletionRequest
    optional = {name for name, field in kind.model_fields.items() if not field.is_required()}
    nulls = dict.fromkeys(optional | set(kind.unsupported))
    with_nulls = parse(json.dumps(base | nulls | {"seed": 1}).encode())
    assert with_nulls == parse(json.dumps(base | {"seed": 1}).encode())


@BOTH
def test_unknown_fields_are_named(parse: Parse, base: dict[str, Any]) -> None:
    """A typing error never passes in silence; an endless name is cut."""
    error = refusal(parse, base | {"temprature": 0})
    assert (error.field, error.message) == ("temprature", "is not a field that is known here")
    assert len(refusal(parse, base | {"x" * 100_000: 0}).field) == 64


NEUTRAL = [
    (parse_chat, CHAT, ChatRequest),
    (parse_completion, COMPLETION, CompletionRequest),
]


@pytest.mark.parametrize(("parse", "base", "kind"), NEUTRAL, ids=["chat", "text"])
def test_unsupported_fields(
    parse: Parse, base: dict[str, Any], kind: type[GenerationRequest]
) -> None:
    """Each is refused by name, and taken at every value that asks for nothing."""
    for name, values in kind.unsupported.items():
        for value in values:
            parse(json.dumps(base | {name: value}).encode())
        error = refusal(parse, base | {name: ["something"]})
        assert error.field == name
        assert error.message.startswith("is not supported")
        assert parse(json.dumps(base | {name: None}).encode()).request.model == "m"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "text", "more": 1}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("store", 0),
        ("parallel_tool_calls", 1),
        ("service_tier", "flex"),
        ("metadata", {"a": "b"}),
    ],
)
def test_what_looks_like_nothing_and_is_not(field: str, value: object) -> None:
    """The very values are compared, types and all: 0 is not false."""
    error = refusal(parse_chat, CHAT | {field: value})
    assert error.field == field
    assert error.message.startswith("is not supported")


LIMITS = [
    ("n", 1, 16, 1),
    ("seed", 0, 2**64 - 1, 1),
    ("top_k", 0, 2**31 - 1, 1),
    ("priority", -100, 100, 1),
    ("temperature", 0.0, 100.0, 0.01),
    ("min_p", 0.0, 1.0, 0.01),
    ("frequency_penalty", -2.0, 2.0, 0.01),
    ("presence_penalty", -2.0, 2.0, 0.01),
]


@BOTH
@pytest.mark.parametrize(("field", "low", "high", "step"), LIMITS)
def test_limits_are_those_of_the_core(
    parse: Parse, base: dict[str, Any], field: str, low: float, high: float, step: float
) -> None:
    """Both ends pass here and there; behind them both refuse."""
    request = parse(json.dumps(base | {"seed": 1}).encode()).request
    holder = request if field in ("n", "priority") else request.sampling
    for value in (low, high):
        parsed = parse(json.dumps(base | {field: value}).encode())
        check_generate(
            parsed.request, vocab_size=VOCAB_SIZE, max_prompt_bytes=1000, max_model_len=256
        )
    for value, bound in ((low - step, "at least"), (high + step, "at most")):
        error = refusal(parse, base | {field: value})
        assert error.field == field
        assert f"must be {bound}" in error.message
        try:
            setattr(holder, field, value)
        except ValueError:
            continue  # protobuf cannot carry it
        with pytest.raises(InvalidParam):
            check_generate(request, vocab_size=VOCAB_SIZE, max_prompt_bytes=1000, max_model_len=256)


@BOTH
@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_counts_fit_in_protobuf(parse: Parse, base: dict[str, Any], field: str) -> None:
    """The largest count that the wire has is taken, the next one is refused."""
    parse(json.dumps(base | {field: 2**32 - 1}).encode())
    assert refusal(parse, base | {field: 2**32}).message == (
        "must be at most 4294967295, got 4294967296"
    )
    assert refusal(parse, base | {field: -1}).field == field


def test_every_field_is_documented() -> None:
    """docs/http.md names what is taken and what is refused."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()
    kinds = (ChatRequest, CompletionRequest, Message, StreamOptions, Speculation)
    names = {name for kind in kinds for name in (*kind.model_fields, *kind.unsupported)}
    missing = {name for name in names if f"`{name}`" not in page and f".{name}`" not in page}
    assert missing == set()
