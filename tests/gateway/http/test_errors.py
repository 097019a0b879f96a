"""Errors in the shape that clients of OpenAI's API read."""

from __future__ import annotations

import json

import grpc
import pytest

from gateway.http.errors import error_body, json_field, status_of
from gateway.http.to_request import parse_chat, parse_completion
from gateway.requests import check_generate, fit_stopping
from gateway.target_client import TargetFailed
from outrider.params import InvalidParam, StoppingParams
from outrider.serving.errors import (
    DeadlinePassed,
    EngineFailed,
    Incompatible,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("model", "must be set"), 400, None),
        (InvalidParam("n", "must be 1"), 400, None),
        (Unauthenticated("no key"), 401, "invalid_api_key"),
        (TargetFailed(grpc.StatusCode.PERMISSION_DENIED, "no"), 403, "permission_denied"),
        (NotFound("model: 'x' is not served here"), 404, "model_not_found"),
        (TooLarge("at most 4 MB"), 413, "request_too_large"),
        (Overloaded("full", 1), 429, "rate_limit_exceeded"),
        (TargetFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), 429, "rate_limit_exceeded"),
        (TargetFailed(grpc.StatusCode.CANCELLED, "left"), 499, "cancelled"),
        (EngineFailed("a step failed"), 500, "internal_error"),
        (Incompatible("another vocabulary"), 500, "internal_error"),
        (TargetFailed(grpc.StatusCode.UNKNOWN, "?"), 500, "internal_error"),
        (TargetFailed(grpc.StatusCode.UNIMPLEMENTED, "no"), 501, "not_implemented"),
        (Unavailable("draining"), 503, "unavailable"),
        (DeadlinePassed("after 2 s"), 504, "timeout"),
    ],
)
def test_each_error_has_its_status(
    error: OutriderError | InvalidParam, status: int, code: str | None
) -> None:
    """Status, code and message say what it is; the body has OpenAI's four fields."""
    got_status, headers, body = error_body(error)
    detail = json.loads(body)["error"]
    assert (got_status, detail["code"], detail["message"]) == (status, code, str(error))
    assert detail.keys() == {"message", "type", "param", "code"}
    assert detail["type"] in {"invalid_request_error", "rate_limit_error", "server_error"}
    assert headers["content-type"] == "application/json"
    assert ("retry-after" in headers) == (isinstance(error, Overloaded) or status == 503)
    assert ("www-authenticate" in headers) == (status == 401)
    assert b"\n" not in body
    if isinstance(error, OutriderError) and not isinstance(error, TooLarge):
        assert status_of(error.code) == status


@pytest.mark.parametrize(("delay_s", "header"), [(0, "1"), (0.2, "1"), (1, "1"), (1.01, "2")])
def test_retry_after_is_whole_seconds(delay_s: float, header: str) -> None:
    """Rounded up, and at least one: nobody comes back too early."""
    assert error_body(Overloaded("full", delay_s))[1]["retry-after"] == header


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("stopping.max_tokens", "max_tokens"),
        ("stopping.stop_token_ids[3]", "stop_token_ids[3]"),
        ("stopping.include_stop", "include_stop_str_in_output"),
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[7]", "logit_bias[7]"),
        ("speculation.max_draft_tokens", "speculation.max_draft_tokens"),
        ("chat", "messages"),
        ("chat.messages", "messages"),
        ("chat.messages[3].role", "messages[3].role"),
        ("token_ids.ids", "prompt"),
        ("token_ids.ids[5]", "prompt[5]"),
        ("text", "prompt"),
        ("input", "prompt"),
        ("n", "n"),
        ("priority", "priority"),
        ("texture", "texture"),
        ("x.text", "x.text"),
    ],
)
def test_names_of_the_json(ours: str, theirs: str) -> None:
    """A client reads the name that it wrote, in `param` and in the message."""
    assert json_field(ours) == theirs
    for error in InvalidRequest(ours, "is wrong"), InvalidParam(ours, "is wrong"):
        detail = json.loads(error_body(error)[2])["error"]
        assert (detail["param"], detail["message"]) == (theirs, f"{theirs}: is wrong")


def test_the_body_is_no_field() -> None:
    """What is wrong with the bytes as a whole has no `param`."""
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(b"{")
    detail = json.loads(error_body(caught.value)[2])["error"]
    assert detail["param"] is None
    assert detail["message"].startswith("body: is not JSON")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [511, 512]}, "prompt[1]"),
        ({"prompt": "x" * 1001}, "prompt"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop_token_ids": [0, 512]}, "stop_token_ids[1]"),
        ({"max_tokens": 16, "min_tokens": 17}, "min_tokens"),
        ({"top_p": 1e-60}, "top_p"),  # 0 as a float32
    ],
)
def test_the_cores_refusals_name_the_jsons_fields(fields: dict[str, object], param: str) -> None:
    """What only the core can check is named as the request has it."""
    body = {"model": "m", "prompt": "Hi"} | fields
    request = parse_completion(json.dumps(body).encode()).request
    with pytest.raises((InvalidRequest, InvalidParam)) as caught:
        check_generate(request, vocab_size=512, max_prompt_bytes=1000, max_model_len=256)
    assert json.loads(error_body(caught.value)[2])["error"]["param"] == param


def test_a_prompt_that_leaves_no_room() -> None:
    """A chat's length is its messages' fault, a text's its prompt's."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    for parse, body, param in (
        (parse_chat, chat, "messages"),
        (parse_completion, {"model": "m", "prompt": "Hi"}, "prompt"),
        (parse_completion, {"model": "m", "prompt": [1]}, "prompt"),
    ):
        request = parse(json.dumps(body).encode()).request
        prompt = check_generate(
            request, vocab_size=512, max_prompt_bytes=1000, max_model_len=256
        ).prompt
        with pytest.raises(InvalidRequest) as caught:
            fit_stopping(StoppingParams(), prompt, 300, 256)
        detail = json.loads(error_body(caught.value)[2])["error"]
        assert detail["param"] == param
        assert detail["message"].startswith(f"{param}: the prompt has 300 tokens")


def test_not_found_names_the_model() -> None:
    """It is the one thing that a request can name."""
    detail = json.loads(error_body(NotFound("model: 'x' is not served here"))[2])["error"]
    assert detail["param"] == "model"
