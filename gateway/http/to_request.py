"""A request of OpenAI's API to the message that every door gives to the core.

Checks what only this door knows: the shape of the JSON, fields that exclude each other, and that
protobuf can carry the values. What depends on the model is the core's to check.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.http.json_body import read_json
from gateway.http.problems import first_problem
from gateway.http.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Speculation,
)
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2

COMPLETION_MAX_TOKENS = 16
"""OpenAI's own default for plain texts; chats go on to the context's end. Not put into the request:
a lower cap of the operator's would then refuse what nobody has asked for."""
_SEED_BITS = 53
"""Of a seed that nobody chose: clients whose numbers are all floats can read it and send it."""

_MODES = {
    None: sampling_pb2.SpeculationParams.MODE_UNSPECIFIED,
    "auto": sampling_pb2.SpeculationParams.MODE_AUTO,
    "off": sampling_pb2.SpeculationParams.MODE_OFF,
    "fixed": sampling_pb2.SpeculationParams.MODE_FIXED,
}
_VERIFICATIONS = {
    None: sampling_pb2.SpeculationParams.VERIFICATION_UNSPECIFIED,
    "exact_match": sampling_pb2.SpeculationParams.VERIFICATION_EXACT_MATCH,
    "rejection": sampling_pb2.SpeculationParams.VERIFICATION_REJECTION,
}

_Request = TypeVar("_Request", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a body asks for."""

    request: pb.GenerateRequest
    """Without a request id: that is a header's."""
    stream: bool
    """The answer is wanted event by event."""
    include_usage: bool
    """A stream ends with the usage."""
    logprobs: bool
    """Log-probabilities are wanted in the answer."""
    default_max_tokens: int = 0
    """Where the request does not say and the operator neither; 0: up to the context's end."""


def parse_chat(body: bytes) -> ParsedRequest:
    """From the body of a chat completion. Raises InvalidRequest, naming the field in the JSON."""
    asked = _validate(ChatRequest, body)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequest("top_logprobs", "can only be set when logprobs is true")
    request = _request(asked, _chat_max_tokens(asked))
    request.chat.messages.extend(_message(each) for each in asked.messages)
    if asked.logprobs:
        request.logprobs = asked.top_logprobs or 0
    return _parsed(asked, request, bool(asked.logprobs))


def parse_completion(body: bytes) -> ParsedRequest:
    """From the body of a plain completion. Raises InvalidRequest, naming the field in the JSON."""
    asked = _validate(CompletionRequest, body)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise InvalidRequest(
            "best_of", f"is not supported, except as n ({asked.n or 1}), got {asked.best_of}"
        )
    request = _request(asked, asked.max_tokens)
    if isinstance(asked.prompt, str):
        request.text = asked.prompt
    else:
        request.token_ids.ids.extend(asked.prompt)
        request.token_ids.SetInParent()  # an empty list is a choice too
    if asked.logprobs is not None:
        request.logprobs = asked.logprobs
    parsed = _parsed(asked, request, asked.logprobs is not None)
    return replace(parsed, default_max_tokens=COMPLETION_MAX_TOKENS)


def _validate(kind: type[_Request], body: bytes) -> _Request:
    value: Any = read_json(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise first_problem(error) from None  # its text would hold the prompt


def _chat_max_tokens(asked: ChatRequest) -> int | None:
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_completion_tokens", f"must be equal to max_tokens ({old}) beside it, got {new}"
        )
    return old if new is None else new


def _request(asked: GenerationRequest, max_tokens: int | None) -> pb.GenerateRequest:
    seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
    return pb.GenerateRequest(
        model=asked.model,
        sampling=sampling_pb2.SamplingParams(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            seed=seed,
            repetition_penalty=asked.repetition_penalty,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            logit_bias=asked.logit_bias,
        ),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            include_stop=asked.include_stop_str_in_output,
        ),
        speculation=_speculation(asked.speculation),
        n=asked.n,
        priority=asked.priority,
    )


def _speculation(asked: Speculation | None) -> sampling_pb2.SpeculationParams | None:
    if asked is None:
        return None
    return sampling_pb2.SpeculationParams(
        mode=_MODES[asked.mode],
        max_draft_tokens=asked.max_draft_tokens,
        verification=_VERIFICATIONS[asked.verification],
    )


def _message(asked: Message) -> pb.ChatMessage:
    role = "system" if asked.role == "developer" else asked.role
    return pb.ChatMessage(role=role, content=asked.content)


def _parsed(asked: GenerationRequest, request: pb.GenerateRequest, logprobs: bool) -> ParsedRequest:
    stream = bool(asked.stream)
    if asked.stream_options is not None and not stream:
        raise InvalidRequest("stream_options", "can only be set when stream is true")
    return ParsedRequest(
        request=request,
        stream=stream,
        include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        logprobs=logprobs,
    )
