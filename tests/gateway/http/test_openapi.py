"""The document of the API: valid, complete, and of one mind with what is taken and given."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from gateway.http.errors import error_body
from gateway.http.openapi import openapi_document
from gateway.http.to_request import parse_chat, parse_completion
from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest, Overloaded

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """As a client reads it."""
    document: dict[str, Any] = json.loads(json.dumps(openapi_document()))
    return document


def validator(document: dict[str, Any], name: str) -> Any:
    """Of one schema, with all that it refers to."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


def references(value: Any) -> set[str]:
    """All that a document refers to."""
    if isinstance(value, dict):
        found = {value["$ref"]} if "$ref" in value else set()
        return found.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_pages_and_statuses(document: dict[str, Any]) -> None:
    """Every page is there, and every way in which a request for text can end."""
    assert document["openapi"].startswith("3.1.")
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/healthz",
        "/readyz",
    }
    for path in "/v1/chat/completions", "/v1/completions":
        statuses = document["paths"][path]["post"]["responses"].keys()
        assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= statuses
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    """Each schema is there and is a JSON schema."""
    schemas = document["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in references(document)} <= set(
        schemas
    )
    for name in schemas:
        validator(document, name)


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"n": 16, "seed": 2**64 - 1, "temperature": 0, "top_p": 1, "stop": "x"}, {}),
    ({"stop": ["a", "b"], "logit_bias": {"5": -1.5}, "stop_token_ids": [1]}, {}),
    ({"speculation": {"mode": "off"}, "stream": True, "stream_options": {}}, {}),
    ({"max_tokens": None, "user": None, "priority": -100}, {}),
    ({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}, {"echo": False}),
    ({"logprobs": True, "top_logprobs": 0, "store": False}, {"logprobs": 20, "best_of": 1}),
    ({"messages": [{"role": "developer", "content": [{"type": "text", "text": ""}]}]}, {}),
    ({"messages": [{"role": "assistant", "content": "", "refusal": None}]}, {"prompt": [1, 2]}),
    ({}, {"prompt": ["Hi"]}),
    ({}, {"prompt": [[1, 2]]}),
]
BAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 17}, {"n": 0}),
    ({"seed": -1}, {"seed": 2**64}),
    ({"temperature": "1"}, {"temperature": 101}),
    ({"top_p": 0}, {"top_p": 1.5}),
    ({"stop": [""]}, {"stop": 5}),
    ({"stop": ["x"] * 17}, {"stop": "x" * 513}),
    ({"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}}),
    ({"unknown": 1}, {"suffix": "x"}),
    ({"tools": [{}]}, {"echo": True}),
    ({"store": 0}, {"echo": 0}),
    ({"messages": []}, {"prompt": []}),
    ({"messages": [{"role": "tool", "content": ""}]}, {"prompt": ["a", "b"]}),
    ({"messages": [{"role": "user", "content": None}]}, {"prompt": [-1]}),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, {"prompt": [[]]}),
    ({"stream_options": {"include_obfuscation": True}}, {"stream_options": []}),
    ({"speculation": {"mode": "on"}}, {"speculation": {"k": 1}}),
    ({"model": ""}, {"model": None}),
    ({"top_logprobs": 21}, {"logprobs": True}),
]


@pytest.mark.parametrize("kind", ["ChatRequest", "CompletionRequest"])
def test_requests_are_described_as_they_are_taken(document: dict[str, Any], kind: str) -> None:
    """What the document allows is parsed, what it forbids is refused, by the same limits."""
    schema = validator(document, kind)
    is_chat = kind == "ChatRequest"
    for chat, completion in GOOD:
        body = CHAT | chat if is_chat else COMPLETION | completion
        schema.validate(body)
        (parse_chat if is_chat else parse_completion)(json.dumps(body).encode())
    for chat, completion in BAD:
        body = CHAT | chat if is_chat else COMPLETION | completion
        assert not schema.is_valid(body), body
        if body.get("prompt") == [] or body.get("prompt") == [[]]:
            continue  # an empty prompt is the core's to refuse
        with pytest.raises(InvalidRequest):
            (parse_chat if is_chat else parse_completion)(json.dumps(body).encode())


def test_errors_are_described(document: dict[str, Any]) -> None:
    """The body of an error is what the document says."""
    schema = validator(document, "Error")
    for error in InvalidRequest("n", "x"), InvalidParam("n", "x"), Overloaded("full", 1):
        schema.validate(json.loads(error_body(error)[2]))
    assert not schema.is_valid({"error": "x"})
