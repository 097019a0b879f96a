"""A gateway as the command line sees it: plain options in, plain events out.

Blocking calls, which another thread can cancel; what goes over the wire is `outrider.client`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.client.answers import Chunk, Finish
from outrider.client.wire import Settings, chunk_from_proto, generate_request, key_metadata
from outrider.serving.channel import open_blocking_channel
from outrider.serving.settings import LARGEST_MESSAGE_BYTES
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

_DETOKENIZE_S = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask."""

    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()
    """(role, content) turns; used instead of `text` when there are any."""
    settings: Settings = field(default_factory=Settings)


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
        """Events as they come. Leaving early cancels the request.

        Raises InvalidRequest for settings that the wire cannot carry.
        """
        call = self._call = self._stub.Generate(
            _request(question), timeout=timeout_s, metadata=self._metadata
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


def _request(question: Question) -> pb.GenerateRequest:
    turns = [{"role": role, "content": content} for role, content in question.chat]
    text = None if turns else question.text
    return generate_request(text, turns or None, None, question.settings)
