"""The answers of OpenAI's API as this gateway gives them, for the type checker and the document.

Fields that OpenAI does not have: `seed` and `speculation`, and what a model says of itself.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

FinishReason = Literal["stop", "length"]

_exactly = with_config(ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True))


@_exactly
class TopLogprob(TypedDict):
    """One of the likeliest tokens at a position."""

    token: str
    """Its bytes as text; U+FFFD for what is no whole character."""
    logprob: float
    """Natural logarithm of its probability; -9999 for less than that."""
    bytes: list[int]
    """Exactly what it stands for: characters may be spread over several tokens."""


@_exactly
class TokenLogprob(TypedDict):
    """One token of the answer."""

    token: str
    """As in `top_logprobs`, as the two that follow."""
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]
    """The likeliest tokens there, best first."""


@_exactly
class ChatLogprobs(TypedDict):
    """The tokens of a message, or of a piece of it."""

    content: list[TokenLogprob]
    refusal: None


@_exactly
class CompletionLogprobs(TypedDict):
    """The tokens of a text, or of a piece of it: four lists side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The token itself, and the likeliest ones."""
    text_offset: list[int]
    """How many characters the answer's earlier tokens complete."""


@_exactly
class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Their keys and values came from the prefix cache."""


@_exactly
class SpeculationUsage(TypedDict):
    """What drafts did for all choices together."""

    rounds: int
    """Verifications that had at least one draft token."""
    drafted: int
    """Draft tokens that a step verified."""
    accepted: int
    """Draft tokens that the target would have chosen itself."""
    accepted_per_position: list[int]
    """Of the rounds, how many accepted at least i + 1 drafts."""
    unused: dict[str, int]
    """Proposed tokens that no step verified, by reason."""
    plain_steps: int
    """Steps that ran without a draft."""


@_exactly
class Usage(TypedDict):
    """What was read and written, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationUsage


@_exactly
class ChatMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


@_exactly
class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    seed: int
    """Gives this text again, as choice 0."""


@_exactly
class ChatCompletion(TypedDict):
    """The whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@_exactly
class ChatDelta(TypedDict):
    """What comes to a message: its role first, then pieces of its text."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]


@_exactly
class ChatChunkChoice(TypedDict):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    seed: NotRequired[int]
    """With the finish."""


@_exactly
class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    """None with the usage."""
    usage: NotRequired[Usage | None]
    """Null before the last event; only if it was asked for."""


@_exactly
class CompletionChoice(TypedDict):
    """One text, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """Null in a stream until the end."""
    seed: NotRequired[int]
    """With the finish."""


@_exactly
class Completion(TypedDict):
    """The whole answer to a prompt, or one event of it in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


@_exactly
class Model(TypedDict):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """The longest sequence it takes, prompt and answer together."""
    ready: bool
    """At least one target is ready to serve it."""


@_exactly
class ModelList(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


@_exactly
class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong, as the request names it."""
    code: str | None


@_exactly
class Error(TypedDict):
    """The body of every answer that is none."""

    error: ErrorDetail
