"""Clients that note when each piece of an answer comes: of a target, and of a gateway's doors.

Each has a connection of its own. They do as little as they can, since what they do is measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from outrider.serving.channel import open_channel
from protos.outrider.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)

PROMPT = "Tell me what a gateway does for the tokens that pass it. " * 8


@dataclass
class Arrivals:
    """When one request began and each piece of its answer came, in nanoseconds."""

    request_id: str
    begun_ns: int = field(default_factory=time.monotonic_ns)
    arrived_ns: list[int] = field(default_factory=list)


class StreamClient(Protocol):
    """One client."""

    def pieces(self, request_id: str, max_tokens: int) -> AsyncIterator[None]:
        """Ask; yields at each piece of the answer that has text. Raises what goes wrong."""

    async def close(self) -> None:
        """Hang up."""


async def read(client: StreamClient, request_id: str, max_tokens: int) -> Arrivals:
    """A whole answer."""
    arrivals = Arrivals(request_id)
    async for _ in client.pieces(request_id, max_tokens):
        arrivals.arrived_ns.append(time.monotonic_ns())
    return arrivals


def _stopping(max_tokens: int) -> sampling_pb2.StoppingParams:
    return sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)


class TargetClient:
    """Asks a target itself, with as many ids as the prompt has words."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = target_pb2_grpc.TargetStub(self._channel)

    async def pieces(self, request_id: str, max_tokens: int) -> AsyncIterator[None]:
        """Of gRPC."""
        request = target_pb2.TokenRequest(
            request_id=request_id,
            token_ids=range(100, 100 + len(PROMPT.split())),
            stopping=_stopping(max_tokens),
        )
        async for _ in self._stub.Generate(request):
            yield

    async def close(self) -> None:
        """Cut the channel."""
        await self._channel.close(None)


class GrpcClient:
    """Asks a gateway over gRPC."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def pieces(self, request_id: str, max_tokens: int) -> AsyncIterator[None]:
        """Of gRPC."""
        chat = inference_pb2.Chat(
            messages=[inference_pb2.ChatMessage(role="user", content=PROMPT)],
        )
        request = inference_pb2.GenerateRequest(
            request_id=request_id, chat=chat, stopping=_stopping(max_tokens)
        )
        async for response in self._stub.Generate(request):
            if response.HasField("chunk"):
                yield

    async def close(self) -> None:
        """Cut the channel."""
        await self._channel.close(None)


class HttpClient:
    """Asks a gateway over HTTP, on one connection that is kept."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def pieces(self, request_id: str, max_tokens: int) -> AsyncIterator[None]:
        """Of server-sent events."""
        if self._reader is None or self._writer is None:
            host, _, port = self._address.rpartition(":")
            self._reader, self._writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"X-Request-Id: {request_id}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise OSError(answer.decode())
        async for data in _chunks(self._reader):
            for line in data.splitlines():
                if line.startswith(b"data: {") and b'"content":"' in line and _has_text(line[6:]):
                    yield

    async def close(self) -> None:
        """Cut the connection."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of chunked transfer encoding, to its end."""
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:size]
    await reader.readexactly(2)


def _has_text(event: bytes) -> bool:
    choices = json.loads(event)["choices"]
    return bool(choices and choices[0]["delta"].get("content"))
