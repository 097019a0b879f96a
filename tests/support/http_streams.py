"""Streams of events as a client of the HTTP port reads them, and the requests for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.gateways import Gateway
from tests.support.http_gateway import (
    COMPLETIONS,
    MODEL,
    Broken,
    HttpAnswer,
    HttpClient,
    HttpGateway,
)


def completion(prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy request for a text that ends at its cap and nowhere else."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | fields


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The same, event by event, with the usage at the end."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


@contextlib.asynccontextmanager
async def http_front(gateway: Gateway) -> AsyncIterator[HttpGateway]:
    """The HTTP port of a gateway that runs in this process; its clients are closed at the end."""
    async with contextlib.AsyncExitStack() as clients:
        yield HttpGateway(gateway, None, clients)


@dataclass
class HttpStream:
    """One request for a stream, on a connection of its own."""

    client: HttpClient
    answer: HttpAnswer | None = None
    ended: bool = False
    """Its end was read, in good order."""
    broken: bool = False
    """The connection ended before it."""

    @classmethod
    async def open(
        cls, port: int, body: dict[str, Any], path: str = COMPLETIONS, **options: Any
    ) -> HttpStream:
        """Connect and send. options: of `HttpClient.connect`."""
        client = await HttpClient.connect(port, **options)
        await client.send("POST", path, streamed(body))
        return cls(client)

    async def read(self) -> bool:
        """What comes next of the head or the body. False at either kind of end."""
        try:
            if self.answer is None:
                self.answer = await self.client.head()
                self.answer.body = bytearray()  # grows in place: it may have megabytes
                return True
            self.ended = not await self.client.part(self.answer)
        except Broken:
            self.broken = True
        return not (self.ended or self.broken)

    async def read_first(self) -> None:
        """To the first bytes of the body."""
        while not (self.answer and self.answer.body) and await self.read():
            pass
        assert self.answer is not None
        assert self.answer.status == 200, self.answer.body

    async def read_all(self) -> None:
        """To the end."""
        while await self.read():
            pass

    def close(self) -> None:
        """In good order."""
        self.client.close()

    @property
    def events(self) -> list[Any]:
        """All that have come, without `[DONE]`; a part of one is left out only where it broke."""
        answer = self.answer
        if answer is None:
            return []
        body = answer.body
        if not self.ended:
            body = body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
        events = HttpAnswer(answer.status, {}, body).events
        return [event for event in events if event != "[DONE]"]

    @property
    def text(self) -> str:
        """So far."""
        return "".join(
            choice["text"] for event in self.events for choice in event.get("choices", ())
        )

    @property
    def whole(self) -> bool:
        """It came to its end, with `[DONE]`, a finish and the usage."""
        if not self.ended or self.answer is None or self.answer.status != 200:
            return False
        if not self.answer.body.endswith(b"data: [DONE]\n\n"):
            return False
        return self.usage is not None and self.events[-2]["choices"][0]["finish_reason"] == "length"

    @property
    def usage(self) -> dict[str, Any] | None:
        """Once it was told."""
        events = self.events
        return events[-1].get("usage") if events else None

    @property
    def error(self) -> dict[str, Any] | None:
        """What it ended with: the last event's, or the whole answer's."""
        if self.answer is None:
            return None
        if self.answer.status != 200:
            return dict(self.answer.error)
        events = self.events
        error = events[-1].get("error") if events else None
        return dict(error) if error else None


async def read_all(streams: Sequence[HttpStream], timeout_s: float) -> None:
    """Every one to whatever end it has."""
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(stream.read_all() for stream in streams))
