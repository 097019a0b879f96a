"""A gateway as the command line sees it: plain options in, plain events out.

Blocking calls, which another thread can cancel; protobuf stays in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.client.answers import Chunk, Finish
from outrider.client.wire import chunk_from_proto, key_metadata
from outrider.params import GenerationParams
from outrider.serving.channel import open_blocking_channel
from outrider.serving.settings import LARGEST_MESSAGE_BYTES
from outrider.serving.tls import ClientTls
from outrider.serving.wire import sampling_to_proto, speculation_to_proto, stopping_to_proto
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

_DETOKENIZE_S = 10.0


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

    def __init__(
        self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        """Raises SettingsError for certificates of no use."""
        self.tls = tls
        # How long a prompt may be is the gateway's to say.
        self._channel = open_blocking_channel(address, LARGEST_MESSAGE_BYTES, tls=tls)
        self._metadata = key_metadata(api_key)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._call: Any = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def generate(self, question: Question, timeout_s: float | None) -> Iterator[Chunk | Finish]:
        """Events as they come. Leaving early cancels the request."""
        call = self._call = self._stub.Generate(
            _to_proto(question), timeout=timeout_s, metadata=self._metadata
        )
        try:
            for message in call:
                chunk = chunk_from_proto(message)
                yield chunk.finish or chunk
        finally:
            call.cancel()

    def text_of(self, token_id: int) -> str:
        """What one token reads like by itself; that may be half a character."""
        request = pb.DetokenizeRequest(ids=[token_id], keep_special=True)
        response = self._stub.Detokenize(request, timeout=_DETOKENIZE_S, metadata=self._metadata)
        return str(response.text)

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
