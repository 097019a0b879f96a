"""The core's messages to OpenAI's answers: whole, or event by event.

An answer object lives as long as its request. A piece without text makes no event, unless it brings
log-probabilities that were asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.http.answer_schema import (
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
)
from gateway.http.json_out import GrowingObject, list_of, to_json, with_members
from gateway.http.to_request import ParsedRequest
from gateway.http.token_logprobs import CompletionOffsets, chat_logprobs
from gateway.http.usage import UsageTotals
from gateway.tokenizer import ModelTokenizer
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2

_Choice = Mapping[str, object]


def _reason(finish: pb.GenerateFinish) -> FinishReason:
    is_length = finish.reason == sampling_pb2.FINISH_REASON_LENGTH
    return "length" if is_length else "stop"


@dataclass(frozen=True, slots=True)
class About:
    """What an answer says beside its text."""

    request_id: str
    model: str
    """The served one's name."""
    tokenizer: ModelTokenizer
    created: int
    """Seconds since 1970."""


@dataclass(slots=True)
class _WholeChoice:
    """What has come of one."""

    texts: list[str] = field(default_factory=list)
    logprobs: GrowingObject = field(default_factory=GrowingObject)
    finish: pb.GenerateFinish | None = None


class HttpAnswer(ABC):
    """What the two APIs have in common. Use `chunks` and then `final`, or `take` and then `whole`.

    Each message costs its share when it comes, and no moment costs much.
    """

    ID_PREFIX: str
    WHOLE: str
    """`object` of a whole answer."""
    EVENT: str
    """`object` of an event."""

    def __init__(self, parsed: ParsedRequest, about: About) -> None:
        self._include_usage = parsed.include_usage
        self._wants_logprobs = parsed.logprobs
        self._tokenizer = about.tokenizer
        self._head = {
            "id": f"{self.ID_PREFIX}{about.request_id}",
            "created": about.created,
            "model": about.model,
        }
        self._totals = UsageTotals()
        self._whole: defaultdict[int, _WholeChoice] = defaultdict(_WholeChoice)

    def chunks(self, response: pb.GenerateResponse) -> list[bytes]:
        """The data of the events that follow from a message, each one line of JSON."""
        if response.HasField("finish"):
            self._totals.add(response.finish)
            choices = self._end(response.finish)
        else:
            choices = self._pieces(response.chunk)
        usage = {"usage": None} if self._include_usage else {}
        return [self._json(self.EVENT, [choice], usage) for choice in choices]

    def final(self) -> list[bytes]:
        """The data of the events behind the last message, without `[DONE]`."""
        if not self._include_usage:
            return []
        return [self._json(self.EVENT, [], {"usage": self._totals.usage()})]

    def take(self, response: pb.GenerateResponse) -> None:
        """The next message of what is to be told as a whole."""
        if response.HasField("finish"):
            self._totals.add(response.finish)
            self._whole[response.finish.index].finish = response.finish
            return
        chunk, choice = response.chunk, self._whole[response.chunk.index]
        choice.texts.append(chunk.text)
        logprobs = self._logprobs(chunk.index, chunk.tokens) if chunk.tokens else None
        if logprobs is not None:
            choice.logprobs.add(logprobs)

    def whole(self) -> bytes:
        """The body for all messages that were taken, every choice's finish among them."""
        choices = []
        for index, choice in sorted(self._whole.items()):
            assert choice.finish is not None
            told = self._choice("".join(choice.texts), choice.finish)
            nothing = self._logprobs(index, [])
            if nothing is not None:  # they were asked for, and there may have been no token
                choice.logprobs.add(nothing)
            logprobs = b"null" if nothing is None else choice.logprobs.json()
            choices.append(with_members(told, logprobs=logprobs))
        head = {**self._head, "object": self.WHOLE, "usage": self._totals.usage()}
        return with_members(head, choices=list_of(choices))

    def _json(self, kind: str, choices: Sequence[_Choice], usage: Mapping[str, object]) -> bytes:
        return to_json({**self._head, "object": kind, "choices": choices, **usage})

    @abstractmethod
    def _pieces(self, chunk: pb.GenerateChunk) -> Sequence[_Choice]:
        """A choice of an event each."""

    @abstractmethod
    def _end(self, finish: pb.GenerateFinish) -> Sequence[_Choice]:
        """A choice of an event each."""

    @abstractmethod
    def _choice(self, text: str, finish: pb.GenerateFinish) -> _Choice:
        """A choice of the whole answer, but for its log-probabilities."""

    @abstractmethod
    def _logprobs(
        self, index: int, tokens: Sequence[sampling_pb2.GeneratedToken]
    ) -> Mapping[str, object] | None:
        """Of the next tokens of a choice; None where nobody has asked."""


class ChatAnswer(HttpAnswer):
    """Of `/v1/chat/completions`."""

    ID_PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    EVENT = "chat.completion.chunk"

    def __init__(self, parsed: ParsedRequest, about: About) -> None:
        super().__init__(parsed, about)
        self._begun: set[int] = set()

    def _pieces(self, chunk: pb.GenerateChunk) -> list[ChatChunkChoice]:
        choices = self._role(chunk.index)
        logprobs = self._logprobs(chunk.index, chunk.tokens) if chunk.tokens else None
        if chunk.text or logprobs:
            choices.append(
                {
                    "index": chunk.index,
                    "delta": {"content": chunk.text},
                    "logprobs": logprobs,
                    "finish_reason": None,
                }
            )
        return choices

    def _end(self, finish: pb.GenerateFinish) -> list[ChatChunkChoice]:
        end: ChatChunkChoice = {
            "index": finish.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": _reason(finish),
            "seed": finish.seed,
        }
        return [*self._role(finish.index), end]

    def _role(self, index: int) -> list[ChatChunkChoice]:
        """A choice begins with who speaks."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ]

    def _choice(self, text: str, finish: pb.GenerateFinish) -> _Choice:
        return {
            "index": finish.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": _reason(finish),
            "seed": finish.seed,
        }

    def _logprobs(
        self, index: int, tokens: Sequence[sampling_pb2.GeneratedToken]
    ) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self._tokenizer) if self._wants_logprobs else None


class CompletionAnswer(HttpAnswer):
    """Of `/v1/completions`."""

    ID_PREFIX = "cmpl-"
    WHOLE = EVENT = "text_completion"

    def __init__(self, parsed: ParsedRequest, about: About) -> None:
        super().__init__(parsed, about)
        self._offsets: dict[int, CompletionOffsets] = {}

    def _pieces(self, chunk: pb.GenerateChunk) -> list[CompletionChoice]:
        logprobs = self._logprobs(chunk.index, chunk.tokens) if chunk.tokens else None
        if not chunk.text and not logprobs:
            return []
        return [
            {
                "index": chunk.index,
                "text": chunk.text,
                "logprobs": logprobs,
                "finish_reason": None,
            }
        ]

    def _end(self, finish: pb.GenerateFinish) -> list[CompletionChoice]:
        return [
            {
                "index": finish.index,
                "text": "",
                "logprobs": None,
                "finish_reason": _reason(finish),
                "seed": finish.seed,
            }
        ]

    def _choice(self, text: str, finish: pb.GenerateFinish) -> _Choice:
        return {
            "index": finish.index,
            "text": text,
            "finish_reason": _reason(finish),
            "seed": finish.seed,
        }

    def _logprobs(
        self, index: int, tokens: Sequence[sampling_pb2.GeneratedToken]
    ) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        if index not in self._offsets:
            self._offsets[index] = CompletionOffsets(self._tokenizer)
        return self._offsets[index].logprobs(tokens)
