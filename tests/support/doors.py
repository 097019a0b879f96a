"""The same chat through either door of a gateway: gRPC, or HTTP and OpenAI's words."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from tests.support.gateways import Gateway
from tests.support.http_gateway import CHAT, MODEL, HttpClient
from tests.support.traced_stack import chat_request, read_all

Headers = Sequence[tuple[str, str]]


class Door(Protocol):
    """Where requests come in."""

    async def chat(
        self, text: str, max_tokens: int, request_id: str = "", headers: Headers = ()
    ) -> int:
        """One greedy chat, with drafts, to its end at its cap: the tokens of its answer."""


class GrpcDoor:
    """The service Inference."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(
        self, text: str, max_tokens: int, request_id: str = "", headers: Headers = ()
    ) -> int:
        """Metadata has its names in lower case: gRPC does not send others."""
        metadata = [(name.lower(), value) for name, value in headers]
        request = chat_request(text, max_tokens, request_id=request_id)
        return await read_all(self._gateway, request, metadata)


class HttpDoor:
    """`/v1/chat/completions`, as a stream, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def chat(
        self, text: str, max_tokens: int, request_id: str = "", headers: Headers = ()
    ) -> int:
        """Headers as they are."""
        named = {"X-Request-Id": request_id} if request_id else {}
        body = chat_body(text, max_tokens, stream_options={"include_usage": True})
        async with http_client(self._port) as client:
            answer = await client.ask("POST", CHAT, body, named | dict(headers))
        assert answer.status == 200, answer.body
        *_, usage, done = answer.events
        assert done == "[DONE]"
        return int(usage["usage"]["completion_tokens"])


def http_port(gateway: Gateway) -> int:
    """Of a gateway in this process that has one."""
    assert gateway.service._http is not None
    return gateway.service._http.port


@contextlib.asynccontextmanager
async def http_client(port: int, **options: Any) -> AsyncIterator[HttpClient]:
    """A connection, closed at the end."""
    client = await HttpClient.connect(port, **options)
    try:
        yield client
    finally:
        client.close()


def chat_body(text: str, max_tokens: int, k: int = 4, **fields: Any) -> dict[str, Any]:
    """What `chat_request` asks for, as a stream."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "speculation": {"mode": "fixed", "max_draft_tokens": k},
        "stream": True,
    } | fields
