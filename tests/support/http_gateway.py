"""A gateway that is asked over HTTP, by a client that sees every byte: h11 on a plain socket.

It sends what a test wants, also what no good client would, and it tells an answer that has ended
from one that was cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import h11

from gateway.http.server import HttpServer
from tests.support.gateways import Gateway, gateway_on, gateway_with
from tests.support.scripted_target import Script, ScriptedTarget

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "tiny"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "max_tokens": 200},
}
"""A good request for each path."""


class Broken(Exception):
    """The connection ended before the answer did."""


@dataclass
class HttpAnswer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    trailing: list[str] = field(default_factory=list)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What is in the body of an answer that is none."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; `[DONE]` as it stands."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "half an event"
        assert all(part.startswith("data: ") for part in parts)
        data = [part.removeprefix("data: ") for part in parts]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class HttpClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._h11 = h11.Connection(h11.CLIENT)

    @classmethod
    async def connect(
        cls, port: int, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None
    ) -> Self:
        """receive_buffer: bytes that the kernel takes for a client that does not read."""
        # With the protocol's name, or asyncio leaves Nagle's algorithm on.
        raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (HOST, port))
        # A reader that stops at little: else what is not read would be buffered here.
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=tls, server_hostname="localhost" if tls else None, limit=4096
        )
        return cls(reader, writer)

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A whole request. body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = b"" if body is None else data
        lines = {"Host": HOST, **({"Content-Type": "application/json"} if data else {})}
        lines |= {"Content-Length": str(len(data))} | dict(headers or {})
        request = h11.Request(method=method, target=path, headers=list(lines.items()))
        await self.write(self._h11.send(request) or b"")
        if data:
            await self.write(self._h11.send(h11.Data(data=data)) or b"")
        await self.write(self._h11.send(h11.EndOfMessage()) or b"")

    async def write(self, data: bytes) -> None:
        """These bytes, whatever they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> HttpAnswer:
        """The beginning of the next answer."""
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        assert isinstance(event, h11.Response)
        headers = {name.decode(): value.decode() for name, value in event.headers}
        assert len(headers) == len(event.headers), "a header twice"
        return HttpAnswer(event.status_code, headers)

    async def part(self, answer: HttpAnswer) -> bool:
        """The next part of the body; False at its end. Raises Broken."""
        event = await self._event()
        if isinstance(event, h11.Data):
            answer.body += event.data
            return True
        assert isinstance(event, h11.EndOfMessage)
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return False

    async def answer(self) -> HttpAnswer:
        """The next answer to its end."""
        answer = await self.head()
        while await self.part(answer):
            pass
        return answer

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """One request and its answer."""
        await self.send(method, path, body, headers)
        return await self.answer()

    async def raw_answer(self, data: bytes) -> HttpAnswer:
        """The answer to bytes that h11 would not send."""
        await self.write(data)
        self._h11.send(h11.Request(method="GET", target="/", headers=[("Host", HOST)]))
        self._h11.send(h11.EndOfMessage())
        return await self.answer()

    async def closed(self) -> bool:
        """Wait for the end of the connection; whether it came in good order."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return False

    def close(self) -> None:
        """In good order."""
        self.writer.close()

    def reset(self) -> None:
        """As a client that has crashed."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def _event(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            try:
                data = await self.reader.read(4096)
            except ConnectionError as error:
                raise Broken from error
            try:
                self._h11.receive_data(data)
                if not data and self._h11.next_event() is h11.NEED_DATA:
                    raise Broken
            except h11.RemoteProtocolError as error:
                raise Broken from error
        return event


async def ask_once(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """One request on a connection of its own, which is closed behind it."""
    client = await HttpClient.connect(port)
    try:
        return await client.ask(method, path, body, headers)
    finally:
        client.close()


@dataclass
class HttpGateway:
    """A gateway and its HTTP port."""

    gateway: Gateway
    target: ScriptedTarget | None
    clients: contextlib.AsyncExitStack

    @property
    def server(self) -> HttpServer:
        """The port as the gateway has it."""
        server = self.gateway.service._http
        assert server is not None
        return server

    @property
    def calls(self) -> Any:
        """The gateway's open calls."""
        assert self.gateway.listening is not None
        return self.gateway.listening.calls

    async def client(self, **options: Any) -> HttpClient:
        """A new connection, which is closed at the end."""
        client = await HttpClient.connect(self.server.port, **options)
        self.clients.callback(client.close)
        return client

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """One request on a connection of its own."""
        return await (await self.client()).ask(method, path, body, headers)


@contextlib.asynccontextmanager
async def http_gateway(
    folder: Path, script: Script, **settings: object
) -> AsyncIterator[HttpGateway]:
    """A ready gateway with an HTTP port, in front of one scripted target."""
    async with (
        contextlib.AsyncExitStack() as clients,
        gateway_with(folder, script, **{"http_port": 0} | settings) as (gateway, target),
    ):
        yield HttpGateway(gateway, target, clients)


@contextlib.asynccontextmanager
async def http_gateway_alone(folder: Path, **settings: object) -> AsyncIterator[HttpGateway]:
    """A gateway whose target is away."""
    async with (
        contextlib.AsyncExitStack() as clients,
        gateway_on(folder, [f"{HOST}:1"], **{"http_port": 0} | settings) as gateway,
    ):
        yield HttpGateway(gateway, None, clients)
