"""The requests of OpenAI's API as this gateway takes them, and what else it takes beside them.

Limits are those of `outrider.params`: told here so that the document of the API holds them too.
Null is as good as a field that is left out. Knows nothing of protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gateway.http.content import Content
from gateway.http.fields import (
    MAX_UINT32,
    LogitBias,
    Neutral,
    Prompt,
    RequestObject,
    Stops,
    TokenId,
)
from gateway.requests import MAX_MESSAGES
from outrider.params import MAX_CHOICES, MAX_LOGPROBS, MAX_PRIORITY, MAX_SEED, MAX_STOP_TOKEN_IDS

MAX_USER_CHARS = 512

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_NumTokens = Annotated[int, Field(ge=0, le=MAX_UINT32)]
_NumTokensAboveZero = Annotated[int, Field(ge=1, le=MAX_UINT32)]
_NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(RequestObject):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    """One more event at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Taken and not used: load generators ask for it, and do with the usage at the end."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {"include_obfuscation": (None, False)}


class Speculation(RequestObject):
    """How drafts may be used. Not part of OpenAI's API."""

    mode: Literal["auto", "off", "fixed"] | None = None
    """`auto`: as it pays. `off`: no drafts. `fixed`: exactly `max_draft_tokens` each round."""
    max_draft_tokens: _NumTokens | None = None
    """The most tokens that a round may draft."""
    verification: Literal["exact_match", "rejection"] | None = None
    """How drafts are checked; with `rejection` a seed does not pin the text down."""


class GenerationRequest(RequestObject):
    """What chats and plain texts have in common."""

    model: Annotated[str, Field(min_length=1)]
    """A name from `/v1/models`."""
    stream: bool | None = None
    """Send the answer as it comes into being, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many choices; choice 0 has the request's seed, the others have seeds made from it."""
    stop: Stops | None = None
    """Strings that end the text."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Pins the text down together with the request. Left out: drawn, and told with each choice."""
    logit_bias: LogitBias | None = None
    """Added to the logits of single tokens, by token id."""
    max_tokens: _NumTokensAboveZero | None = None
    """The most tokens to generate."""
    frequency_penalty: _Penalty | None = None
    """Subtracted once for each time that a token stands in the answer."""
    presence_penalty: _Penalty | None = None
    """Subtracted if a token stands in the answer at all."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 picks the best token. Left out: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the smallest set of tokens whose probability reaches this. Left out: 1."""
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = None
    """Taken and not used."""

    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Keep the k best tokens; 0 keeps all. Not part of OpenAI's API, as all that follow."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens with at least this share of the best token's probability."""
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or answer."""
    min_tokens: _NumTokens | None = None
    """No end before this many tokens."""
    ignore_eos: bool | None = None
    """Go on past the model's end-of-sequence tokens."""
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    """Token ids that end the text."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the text."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Higher goes first, and a second of waiting counts as one more."""
    speculation: Speculation | None = None
    """How drafts may be used."""


class Message(RequestObject):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is another word for `system`."""
    content: Content
    """What was said: a string, or parts that are put together as they stand."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "name": (None,),
        "tool_calls": (None, []),
        "tool_call_id": (None,),
        "function_call": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
    }


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The turns, oldest first, rendered by the model's own template."""
    max_completion_tokens: _NumTokensAboveZero | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Tell the log-probability of each token."""
    top_logprobs: _NumLogprobs | None = None
    """Tell as many of the likeliest tokens at each position too. Only with `logprobs`."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "metadata": (None, {}),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "safety_identifier": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tool_choice": (None, "none"),
        "tools": (None, []),
        "verbosity": (None,),
        "web_search_options": (None,),
    }


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Prompt
    """A text, or token ids; a list of exactly one of either is as good."""
    logprobs: _NumLogprobs | None = None
    """Tell the log-probability of each token and of as many of the likeliest."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Must be equal to `n`: every choice is told."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "echo": (None, False),
        "suffix": (None,),
    }
