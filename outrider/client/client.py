"""A gateway as a Python program sees it: text in, text out, over gRPC.

    async with Client("127.0.0.1:50051") as client:
        answer = await client.generate("The quick brown fox", max_tokens=20)

Protobuf stays in here and in `wire.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack, cast

import grpc
from google.protobuf.message import Message

from outrider.client.answers import Answer, Model, Tokens, collect
from outrider.client.retries import Retries, retrying
from outrider.client.stream import GenerateCall, Stream
from outrider.client.wire import (
    Settings,
    detokenize_request,
    generate_request,
    key_metadata,
    tokenize_request,
)
from outrider.serving.channel import open_channel
from outrider.serving.settings import LARGEST_MESSAGE_BYTES, check_address
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

GENERATE_S = 600.0
SHORT_S = 30.0
"""Time of a call that makes no text, unless it is told another."""

_Messages = Sequence[Mapping[str, str]]


class Client:
    """One gateway, for as long as `async with` holds it. All methods raise OutriderError."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        retries: Retries = Retries(),  # noqa: B008 - a constant
    ) -> None:
        """`address` is host:port. Raises ValueError for what can be no address or key."""
        check_address(address)
        self._address = address
        self._tls = tls
        self._retries = retries
        self._metadata = key_metadata(api_key)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Client:
        """Connects with the first call. Raises SettingsError for certificates of no use."""
        # How long a prompt may be is the gateway's to say.
        self._channel = open_channel(self._address, LARGEST_MESSAGE_BYTES, tls=self._tls)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every request and the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: _Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = GENERATE_S,
        **settings: Unpack[Settings],
    ) -> Stream:
        """The answer to one input, piece by piece; nothing is sent before it is read.

        `prompt` is text as it stands; `messages` are turns of a chat, each {"role": ..., "content":
        ...}; `token_ids` are used as they are. `timeout_s` is for all of it, tries and waits
        included; None: as long as the gateway allows.
        """
        request = generate_request(prompt, messages, token_ids, settings)

        def call(left_s: float | None) -> GenerateCall:
            generate = self._stub.Generate
            return cast(GenerateCall, generate(request, timeout=left_s, metadata=self._metadata))

        return Stream(call, request.n or 1, self._retries, timeout_s, self._tls)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: _Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = GENERATE_S,
        **settings: Unpack[Settings],
    ) -> Answer:
        """The whole answer to one input; see `stream`."""
        stream = self.stream(
            prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **settings
        )
        async with stream:
            return collect([chunk async for chunk in stream])

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: _Messages | None = None,
        model: str = "",
        timeout_s: float | None = SHORT_S,
    ) -> Tokens:
        """The token ids that `generate` would see."""
        request = tokenize_request(prompt, messages, model)
        response = await self._ask("Tokenize", request, timeout_s)
        return Tokens(tuple(response.ids), tuple(response.tokens), response.max_model_len)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special: bool = False,
        model: str = "",
        timeout_s: float | None = SHORT_S,
    ) -> str:
        """The text of token ids, without special tokens unless told to keep them."""
        request = detokenize_request(token_ids, model, keep_special)
        response = await self._ask("Detokenize", request, timeout_s)
        return str(response.text)

    async def models(self, *, timeout_s: float | None = SHORT_S) -> list[Model]:
        """The models that this gateway serves."""
        response = await self._ask("ListModels", pb.ListModelsRequest(), timeout_s)
        return [
            Model(each.name, each.max_model_len, each.vocab_size, each.ready)
            for each in response.models
        ]

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceStub:
        if self._channel is None:
            raise RuntimeError("a client is used inside `async with Client(...) as client:`")
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def _ask(self, method: str, request: Message, timeout_s: float | None) -> Any:
        async def attempt(left_s: float | None) -> Any:
            call = getattr(self._stub, method)
            return await call(request, timeout=left_s, metadata=self._metadata)

        return await retrying(attempt, self._retries, timeout_s, self._tls)
