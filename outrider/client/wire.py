"""The client's plain values to protobuf and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from google.protobuf.message import Message

from outrider.client.answers import Chunk, Finish, PromptToken, Token
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2


class Settings(TypedDict, total=False):
    """What can be asked of an answer, by the names of the API. Left out or None: its default."""

    model: str | None
    """A name from `models()`. Left out: the gateway's only one."""
    request_id: str | None
    """For logs and traces, at most 128 bytes. Left out: the gateway makes one."""
    temperature: float | None
    """0 picks the best token. Left out: 1."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    """0 to 2**64 - 1. Left out: the gateway draws one, and the answer says which."""
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    max_tokens: int | None
    """Left out: up to the context's end."""
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    speculation: Literal["auto", "off", "fixed"] | None
    max_draft_tokens: int | None
    """With "auto" a cap, with "fixed" the number."""
    verification: Literal["exact_match", "rejection"] | None
    logprobs: int | None
    """The log-probability of each token and of this many likely ones at its place."""
    prompt_logprobs: int | None
    n: int | None
    """How many choices."""
    priority: int | None


_FIELDS = {
    **{
        name: ("sampling", name)
        for name in (
            "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
            "frequency_penalty", "presence_penalty", "logit_bias",
        )
    },
    **{
        name: ("stopping", name)
        for name in (
            "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop",
        )
    },
    "speculation": ("speculation", "mode"),
    "max_draft_tokens": ("speculation", "max_draft_tokens"),
    "verification": ("speculation", "verification"),
}  # fmt: skip
"""Where a setting stands on the wire: message and field. The others stand in the request itself."""


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What a call carries. Raises ValueError for what no header can hold."""
    if api_key is None:
        return ()
    if not (api_key and api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key must be printable ASCII, and not empty")
    # On each call, not on the channel: gRPC keeps call credentials for TLS alone.
    return (("authorization", f"Bearer {api_key}"),)


def generate_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    settings: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The request. Raises InvalidRequest for what the wire cannot carry, TypeError for a setting
    that there is not; every other limit is the gateway's to tell."""
    request = pb.GenerateRequest()
    _set_input(request, prompt, messages, token_ids)
    for name, value in settings.items():
        if name not in Settings.__annotations__:
            raise TypeError(f"there is no setting {name!r}")
        if value is None:
            continue
        group, field = _FIELDS.get(name, ("", name))
        if field in ("mode", "verification"):
            value = f"{field}_{value}".upper()
        elif field == "stop" and isinstance(value, str):
            value = [value]
        _set(getattr(request, group) if group else request, group, field, value)
    return request


def tokenize_request(
    prompt: str | None, messages: Sequence[Mapping[str, str]] | None, model: str
) -> pb.TokenizeRequest:
    """The request. Raises InvalidRequest for what the wire cannot carry."""
    request = pb.TokenizeRequest()
    _set(request, "", "model", model)
    _set_input(request, prompt, messages, None)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str, keep_special: bool
) -> pb.DetokenizeRequest:
    """The request. Raises InvalidRequest for what the wire cannot carry."""
    request = pb.DetokenizeRequest(keep_special=keep_special)
    _set(request, "", "model", model)
    _set(request, "", "ids", token_ids)
    return request


def _set_input(
    request: pb.GenerateRequest | pb.TokenizeRequest,
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
) -> None:
    given = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise TypeError(f"exactly one input is needed, got {' and '.join(names) or 'none'}")
    if prompt is not None:
        _set(request, "", "text", prompt)
    elif token_ids is not None:
        _set(request, "", "token_ids", {"ids": token_ids})
    else:
        _set(request, "", "chat", {"messages": messages})


def _set(message: Message, group: str, field: str, value: object) -> None:
    """Set any kind of field, as the message's constructor would."""
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{group}.{field}" if group else field, str(error)) from error


def chunk_from_proto(message: pb.GenerateResponse) -> Chunk:
    """A piece of an answer, or the end of a choice."""
    if message.HasField("finish"):
        return Chunk(message.finish.index, "", (), finish=_finish(message.finish))
    chunk = message.chunk
    tokens = tuple(Token(token.id, token.drafted, *_scores(token)) for token in chunk.tokens)
    prompt = tuple(PromptToken(token.id, *_scores(token)) for token in chunk.prompt_tokens)
    return Chunk(chunk.index, chunk.text, tokens, prompt)


def _scores(
    token: sampling_pb2.GeneratedToken | sampling_pb2.PromptToken,
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    logprob = token.logprob if token.HasField("logprob") else None
    return logprob, tuple((top.id, top.logprob) for top in token.top)


def _finish(message: pb.GenerateFinish) -> Finish:
    stats, usage = message.speculation, message.usage
    reason = sampling_pb2.FinishReason.Name(message.reason)
    return Finish(
        index=message.index,
        reason=reason.removeprefix("FINISH_REASON_").lower(),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        seed=message.seed,
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_position=tuple(stats.accepted_per_position),
        unused=dict(stats.unused),
        plain_steps=stats.plain_steps,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )
