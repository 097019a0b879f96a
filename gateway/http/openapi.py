"""The document of the HTTP API, OpenAPI 3.1, made of what requests are validated with.

Answers are described by the types that build them, so neither can go its own way.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from gateway.http.answer_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Error,
    Model,
    ModelList,
)
from gateway.http.schema import ChatRequest, CompletionRequest
from outrider.serving.version import VERSION

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type] = {
    each.__name__: each
    for each in (
        ChatCompletion,
        ChatCompletionChunk,
        ChatRequest,
        Completion,
        CompletionRequest,
        Error,
        Model,
        ModelList,
    )
}
_SECONDS = r"^([1-9][0-9]{0,4}(\.[0-9]{1,9})?|0\.[0-9]{0,8}[1-9])$"
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which another try makes sense.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_ERRORS: dict[int, str] = {
    400: "The request is not right; `param` names the field.",
    401: "No key, or one that is not known here.",
    404: "There is no such model or page.",
    405: "The page has other methods.",
    408: "The body came too slowly.",
    413: "The body is larger than the limit.",
    415: "The body is not said to be JSON.",
    429: "Too much at once; see Retry-After.",
    431: "The headers are larger than the limit.",
    500: "The fault is here.",
    503: "Not ready, shutting down, or no target serves.",
    504: "The time that the request had is over.",
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"const": "Bearer"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_OF_EVERY_CALL = (401, 405, 431, 500, 503)
_OF_A_GENERATION = (400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503, 504)


@functools.cache
def openapi_document() -> dict[str, Any]:
    """As plain values, ready for JSON; always the same ones."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": VERSION,
            "description": "OpenAI's API for chats, plain texts and models, with more to ask for.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _generation(
                    "Answer a chat", ChatRequest, ChatCompletion, ChatCompletionChunk
                )
            },
            "/v1/completions": {
                "post": _generation("Go on with a text", CompletionRequest, Completion, Completion)
            },
            "/v1/models": {"get": _get("The models that are served", ModelList, *_OF_EVERY_CALL)},
            "/v1/models/{model}": {
                "get": _get("One of them", Model, *_OF_EVERY_CALL, 404),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            },
            "/healthz": {"get": _probe("Whether the process is alive")},
            "/readyz": {"get": _probe("Whether requests would be served now")},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Only where the gateway was given a file of keys.",
                }
            },
        },
        "security": [{"key": []}, {}],
    }


def _schemas() -> dict[str, Any]:
    # As what is read, not as what is written: a default would make a field look required there.
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        (name, "validation", TypeAdapter(body)) for name, body in _BODIES.items()
    ]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return dict(sorted(schemas.items()))


def _generation(summary: str, request: type, answer: type, event: type) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": [
            {
                "name": "X-Request-Id",
                "in": "header",
                "description": "The caller's name for the request, for logs and traces. "
                "Empty: the gateway makes one.",
                "schema": {"type": "string", "pattern": "^[!-~]{0,128}$"},
            },
            {
                "name": "X-Request-Timeout",
                "in": "header",
                "description": "The seconds after which the answer is worth nothing any more.",
                "schema": {"type": "string", "pattern": _SECONDS},
            },
        ],
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {
                "description": "The answer; with `stream` its events, the last one `[DONE]`.",
                "content": _json(answer) | {"text/event-stream": {"schema": _event(event)}},
            },
            **_errors(*_OF_A_GENERATION),
        },
    }


def _get(summary: str, answer: type, *statuses: int) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "As asked.", "content": _json(answer)},
            **_errors(*sorted(statuses)),
        },
    }


def _probe(summary: str) -> dict[str, Any]:
    state = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "security": [{}],
        "responses": {
            "200": {"description": "It is so.", "content": state},
            "503": {"description": "It is not; the text says what it does.", "content": state},
        },
    }


def _errors(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {
            "description": _ERRORS[status],
            "content": _json(Error),
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in statuses
    }


def _event(body: type) -> dict[str, Any]:
    """Of each event: before 3.2 the schema of a stream of events is understood so."""
    bodies = [{"$ref": _REF.format(model=each.__name__)} for each in (body, Error)]
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _json(body: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
