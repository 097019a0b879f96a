"""Requests from the wire, checked: every refusal names the field and the limit.

Protobuf comes in, plain values go out. What this version cannot do is refused by name, so that
nobody believes it was done.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.params import (
    MAX_PRIORITY,
    GenerationParams,
    StoppingParams,
    check_range,
    check_request_id,
    check_token_ids,
)
from outrider.serving import wire
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import inference_pb2 as pb

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 4096
_MESSAGE_BYTES = 32

Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from; exactly one of the three."""

    field: str
    """The field's name on the wire, for errors."""
    text: str | None = None
    messages: Messages | None = None
    """(role, content), oldest first."""
    token_ids: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes to tokenize, with about what a template puts around each message."""
        if self.text is not None:
            return len(self.text.encode())
        messages = self.messages or ()
        return sum(len(content.encode()) + _MESSAGE_BYTES for _, content in messages)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request for text whose values lie inside their limits."""

    request_id: str
    prompt: Prompt
    params: GenerationParams
    """The seed is always set."""
    priority: int


def check_generate(
    request: pb.GenerateRequest, *, vocab_size: int, max_prompt_bytes: int, max_model_len: int
) -> CheckedRequest:
    """Raises InvalidRequest or InvalidParam. A text's length in tokens is not known yet."""
    sampling = wire.sampling_from_proto(request.sampling)
    if not request.sampling.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    sampling.validate(vocab_size)
    stopping = wire.stopping_from_proto(request.stopping)
    stopping.validate(vocab_size)
    speculation = wire.speculation_from_proto(request.speculation)
    answer = wire.answer_from_proto(request)
    answer.validate()
    check_request_id(request.request_id)
    # Before anybody looks at each: there may be millions.
    _check_room("token_ids.ids", len(request.token_ids.ids), max_model_len)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    return CheckedRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=check_prompt(request, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes),
        params=GenerationParams(sampling, stopping, speculation, answer),
        priority=request.priority,
    )


def check_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, *, vocab_size: int, max_prompt_bytes: int
) -> Prompt:
    """The one input that is set, not larger than what may be tokenized."""
    kind = request.WhichOneof("input")
    if kind is None:
        kinds = [field.name for field in request.DESCRIPTOR.oneofs_by_name["input"].fields]
        raise InvalidRequest("input", f"one of {', '.join(kinds)} must be set")
    if kind == "text":
        if not request.text:
            raise InvalidRequest("text", "must not be empty")
        _check_bytes("text", [request.text], max_prompt_bytes)
        return Prompt("text", text=request.text)
    if kind == "chat":
        return Prompt("chat", messages=_check_chat(request.chat, max_prompt_bytes))
    assert isinstance(request, pb.GenerateRequest)
    ids = tuple(request.token_ids.ids)
    if not ids:
        raise InvalidRequest("token_ids.ids", "must not be empty")
    check_token_ids("token_ids.ids", ids, vocab_size)
    return Prompt("token_ids.ids", token_ids=ids)


@dataclass(frozen=True, slots=True)
class TokenCaps:
    """What the operator says of `max_tokens`; 0 for nothing."""

    default: int = 0
    """Of requests that do not say."""
    most: int = 0

    def with_key(self, most: int | None) -> TokenCaps:
        """The same for a caller whose key has a cap of its own."""
        caps = [cap for cap in (self.most, most) if cap]
        return replace(self, most=min(caps, default=0))

    def with_default(self, default: int) -> TokenCaps:
        """The same for a door that has a default of its own, where the operator names none."""
        return replace(self, default=self.default or default)

    def apply(self, stopping: StoppingParams) -> StoppingParams:
        """`stopping` inside the cap. Raises InvalidRequest for what asks for more."""
        most, asked = self.most, stopping.max_tokens
        for name, value in (("max_tokens", asked), ("min_tokens", stopping.min_tokens)):
            if most and value is not None and value > most:
                raise InvalidRequest(
                    f"stopping.{name}", f"must be at most {most} here, got {value}"
                )
        if asked is None and self.default:
            asked = max(self.default, stopping.min_tokens)
        if most:
            asked = min(asked or most, most)
        return replace(stopping, max_tokens=asked)


def place_priority(asked: int, of_key: int | None) -> int:
    """A request's priority. A key has one of its own, which its requests may lower only."""
    return asked if of_key is None else max(-MAX_PRIORITY, of_key + min(0, asked))


def fit_stopping(
    stopping: StoppingParams, prompt: Prompt, num_prompt_tokens: int, max_model_len: int
) -> StoppingParams:
    """`stopping` with max_tokens set: what was asked for, at most what the context has room for."""
    if num_prompt_tokens == 0:
        raise InvalidRequest(prompt.field, "holds no token")
    room = _check_room(prompt.field, num_prompt_tokens, max_model_len)
    if stopping.min_tokens > room:
        raise InvalidRequest(
            "stopping.min_tokens",
            f"the context of {max_model_len} has room for {room} tokens behind a prompt of "
            f"{num_prompt_tokens}, got {stopping.min_tokens}",
        )
    return replace(stopping, max_tokens=min(stopping.max_tokens or room, room))


def _check_room(field: str, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that an answer may have. Raises InvalidRequest if that is none."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            field,
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for an answer in "
            f"the context of {max_model_len}",
        )
    return room


def _check_chat(chat: pb.Chat, max_prompt_bytes: int) -> Messages:
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must not be empty")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            "chat.messages", f"at most {MAX_MESSAGES} messages, got {len(chat.messages)}"
        )
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"chat.messages[{index}].role",
                f"must be one of {', '.join(ROLES)}, got {message.role[:40]!r}",
            )
    _check_bytes("chat.messages", [each.content for each in chat.messages], max_prompt_bytes)
    return tuple((message.role, message.content) for message in chat.messages)


def _check_bytes(field: str, texts: Sequence[str], max_bytes: int) -> None:
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > max_bytes:
        raise InvalidRequest(field, f"at most {max_bytes} bytes, got {num_bytes}")
