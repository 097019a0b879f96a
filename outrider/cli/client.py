"""A gateway as the command line sees it: plain options in, plain events out.

Blocking calls on a plain channel; protobuf stays in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.params import GenerationParams
from outrider.serving.channel import open_blocking_channel
from outrider.serving.settings import LARGEST_MESSAGE_BYTES
from outrider.serving.wire import sampling_to_proto, speculation_to_proto, stopping_to_proto
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2

_DETOKENIZE_S = 10.0


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    drafted: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt; the first has no log-probability."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[PromptToken, ...] = ()
    """The prompt's next ones, when their log-probabilities were asked for."""

    @property
    def drafted(self) -> bool:
        """The text is that of accepted drafts: a gateway puts tokens of one origin in a chunk."""
        return bool(self.tokens) and all(token.drafted for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice."""

    index: int
    reason: str
    prompt_tokens: int
    completion_tokens: int
    seed: int
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...] = ()
    unused: dict[str, int] = field(default_factory=dict)
    plain_steps: int = 0

    @property
    def proposed(self) -> int:
        """What drafters sent: each token was drafted or not used."""
        return self.drafted + sum(self.unused.values())


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask."""

    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()
    """(role, content) turns; used instead of `text` when there are any."""
    params: GenerationParams = field(default_factory=GenerationParams)
    seed: int | None = None
    """None: the gateway draws one; otherwise the same as in `params`."""
    model: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None


class Client:
    """One gateway. Errors are grpc.RpcError."""

    def __init__(self, address: str) -> None:
        # How long a prompt may be is the gateway's to say.
        self._channel = open_blocking_channel(address, LARGEST_MESSAGE_BYTES)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._call: Any = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def generate(self, question: Question, timeout_s: float | None) -> Iterator[Chunk | Finish]:
        """Events as they come. Leaving early cancels the request."""
        call = self._call = self._stub.Generate(_to_proto(question), timeout=timeout_s)
        try:
            for message in call:
                if message.HasField("chunk"):
                    yield _chunk(message.chunk)
                elif message.HasField("finish"):
                    yield _finish(message.finish)
        finally:
            call.cancel()

    def text_of(self, token_id: int) -> str:
        """What one token reads like by itself; that may be half a character."""
        request = pb.DetokenizeRequest(ids=[token_id], keep_special=True)
        return str(self._stub.Detokenize(request, timeout=_DETOKENIZE_S).text)

    def cancel(self) -> None:
        """End the last `generate`, from any thread; it raises CANCELLED unless it has ended."""
        if self._call is not None:
            self._call.cancel()


def _to_proto(question: Question) -> pb.GenerateRequest:
    params = question.params
    sampling = sampling_to_proto(params.sampling)
    if question.seed is None:
        sampling.ClearField("seed")
    source: dict[str, Any] = {"text": question.text}
    if question.chat:
        turns = [pb.ChatMessage(role=role, content=content) for role, content in question.chat]
        source = {"chat": pb.Chat(messages=turns)}
    return pb.GenerateRequest(
        model=question.model,
        sampling=sampling,
        stopping=stopping_to_proto(params.stopping),
        speculation=speculation_to_proto(params.speculation),
        logprobs=question.logprobs,
        prompt_logprobs=question.prompt_logprobs,
        n=question.n,
        **source,
    )


def _chunk(message: pb.GenerateChunk) -> Chunk:
    tokens = tuple(Token(token.id, token.drafted, *_scores(token)) for token in message.tokens)
    prompt = tuple(PromptToken(token.id, *_scores(token)) for token in message.prompt_tokens)
    return Chunk(message.index, message.text, tokens, prompt)


def _scores(
    token: sampling_pb2.GeneratedToken | sampling_pb2.PromptToken,
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    logprob = token.logprob if token.HasField("logprob") else None
    return logprob, tuple((top.id, top.logprob) for top in token.top)


def _finish(message: pb.GenerateFinish) -> Finish:
    stats = message.speculation
    reason = sampling_pb2.FinishReason.Name(message.reason)
    return Finish(
        index=message.index,
        reason=reason.removeprefix("FINISH_REASON_").lower(),
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        seed=message.seed,
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_position=tuple(stats.accepted_per_position),
        unused=dict(stats.unused),
        plain_steps=stats.plain_steps,
    )
