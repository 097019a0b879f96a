"""B51 through HTTP: metric labels that clients choose.

HTTP gives clients more to choose than gRPC does: paths, methods, queries, names of fields and of
headers, bytes that are no HTTP at all. Right: the set of series is the one of the start.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_b51_unbounded_labels import (
    A_HANDFUL,
    NUM_REQUESTS,
    all_of,
    registries,
    series,
)
from tests.support.doors import chat_body, http_port
from tests.support.http_gateway import CHAT, COMPLETIONS, MODEL, HttpClient
from tests.support.scrapes import scrape_registry
from tests.support.sums import assert_gateway_adds_up, total
from tests.support.traced_stack import traced_stack


class Client:
    """Says something new in everything that is free to choose, over connections that it keeps."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = random.Random(51)
        self._idle: list[HttpClient] = []
        self.said: set[str] = set()
        self.num_connections = 0

    def word(self) -> str:
        """Never the same twice."""
        word = "w" + "".join(self._random.choices(string.ascii_lowercase, k=15))
        self.said.add(word)
        return word

    async def good_request(self) -> None:
        """One that is answered."""
        body = chat_body(self.word(), 1, k=1, user=self.word(), stream=self._random.random() < 0.5)
        await self._ask(200, "POST", CHAT, body)

    async def unknown_model(self) -> None:
        """A model that is not served."""
        body = {"model": self.word(), "prompt": self.word(), "user": self.word()}
        await self._ask(404, "POST", COMPLETIONS, body)

    async def unknown_model_in_the_path(self) -> None:
        """The same, where models are looked up."""
        await self._ask(404, "GET", f"/v1/models/{self.word()}/{self.word()}")

    async def unknown_path(self) -> None:
        """A path that there is not, with a query."""
        await self._ask(404, "POST", f"/v1/{self.word()}?{self.word()}={self.word()}", {})

    async def unknown_method(self) -> None:
        """A method that nothing takes."""
        await self._ask(405, self.word().upper(), CHAT)

    async def unknown_query(self) -> None:
        """What no path reads."""
        await self._ask(200, "GET", f"/v1/models?{self.word()}={self.word()}")

    async def unknown_field(self) -> None:
        """A field that is none."""
        body = chat_body(self.word(), 1) | {self.word(): self.word()}
        await self._ask(400, "POST", CHAT, body)

    async def bad_role(self) -> None:
        """A field outside its limits, with a word of the client's in the message."""
        messages = [{"role": self.word(), "content": self.word()}]
        await self._ask(400, "POST", CHAT, {"model": MODEL, "messages": messages})

    async def bad_type(self) -> None:
        """A body that says that it is something else."""
        await self._ask(415, "POST", CHAT, {}, {"Content-Type": f"text/{self.word()}"})

    async def no_http(self) -> None:
        """A connection of its own, for bytes of which nothing can be made."""
        client = await self._connect()
        answer = await client.raw_answer(f"{self.word()} {self.word()}\r\n\r\n".encode())
        assert answer.status == 400
        client.close()

    async def _ask(
        self,
        status: int,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        client = self._idle.pop() if self._idle else await self._connect()
        answer = await client.ask(method, path, body, self._headers() | (headers or {}))
        assert answer.status == status, answer.body
        if answer.headers.get("connection") == "close":
            client.close()
        else:
            self._idle.append(client)

    def _headers(self) -> dict[str, str]:
        """Of nobody's making."""
        names: dict[str, Any] = {"X-User": self.word(), f"X-{self.word()}": "1"}
        return names | {"User-Agent": self.word(), "X-Request-Id": self.word()}

    async def _connect(self) -> HttpClient:
        self.num_connections += 1
        return await HttpClient.connect(self._port)

    def close(self) -> None:
        """All connections."""
        for client in self._idle:
            client.close()


@pytest.mark.timeout(120)
async def test_nothing_that_clients_send_becomes_a_label(tiny_model: Path) -> None:
    """2,000 requests that agree in nothing, at all services, and as many series as before."""
    front = {"http_port": 0}
    async with traced_stack(tiny_model, traced=False, gateway=front, kv_tokens=8192) as stack:
        client = Client(http_port(stack.gateway))
        await client.good_request()
        before = {name: series(registry) for name, registry in registries(stack).items()}
        kinds = [
            client.unknown_model,
            client.unknown_model_in_the_path,
            client.unknown_path,
            client.unknown_method,
            client.unknown_query,
            client.unknown_field,
            client.bad_role,
            client.bad_type,
            client.unknown_model,
            client.good_request,
        ]
        await all_of(kinds[n % len(kinds)] for n in range(NUM_REQUESTS - 50))
        await all_of(client.no_http for _ in range(50))
        for name, registry in registries(stack).items():
            after = series(registry)
            assert before[name] <= after and len(after - before[name]) <= A_HANDFUL, name
            labels = {value for _, pairs in after for _, value in pairs}
            assert not {label.lower() for label in labels} & client.said
            assert not [value for value in labels if "/" in value or "127.0.0.1" in value]
        now = scrape_registry(stack.gateway.service.registry)
        assert_gateway_adds_up(now)
        # Each was answered, and of ten kinds six are requests for text.
        assert total(now, "http_answers_total", "status") == NUM_REQUESTS + 1
        assert now.by("requests_started_by_door_total", "door") == {"grpc": 0, "http": 1171}
        assert now("requests_failed_by_code_total", code="not_found") == 390
        assert now("http_connections_total", stage="established") == client.num_connections
        client.close()
