"""B51: metric labels that clients choose.

Symptom: model names, paths, user fields and the like become labels, so memory and the size of a
scrape grow for ever. Right: whatever clients send, the set of series is the one of the start; a
model that nobody serves is refused; no label holds a request id, a text, an address or a path.
Reported in public of gateways and proxies for language models.
"""

from __future__ import annotations

import asyncio
import random
import string
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.service import GatewayService
from outrider.serving.server import listening
from outrider.serving.settings import GatewaySettings
from protos.outrider.v1 import inference_pb2 as pb
from tests.support.gateways import Gateway
from tests.support.in_process import HOST
from tests.support.scrapes import scrape_registry
from tests.support.traced_stack import TracedStack, chat_request, read_all, traced_stack

NUM_REQUESTS = 2000
AT_ONCE = 50
A_HANDFUL = 5
MAX_SCRAPE_BYTES = 200_000
Code = grpc.StatusCode


class Client:
    """Says something new in every field that is free to choose."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._random = random.Random(51)
        self.said: set[str] = set()

    def word(self) -> str:
        """Never the same twice."""
        word = "w" + "".join(self._random.choices(string.ascii_lowercase, k=15))
        self.said.add(word)
        return word

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Of nobody's making."""
        return (("x-user", self.word()), (f"x-{self.word()}", "1"), ("user-agent", self.word()))

    async def unknown_model(self) -> None:
        """A model that is not served."""
        await self._fails(pb.GenerateRequest(text=self.word(), model=self.word()), Code.NOT_FOUND)

    async def bad_role(self) -> None:
        """A field outside its limits, with a word of the client's in the message."""
        message = pb.ChatMessage(role=self.word(), content=self.word())
        request = pb.GenerateRequest(chat=pb.Chat(messages=[message]), request_id=self.word())
        await self._fails(request, Code.INVALID_ARGUMENT)

    async def unknown_method(self) -> None:
        """A method that there is not."""
        method = self._gateway.channel.unary_unary(f"/outrider.v1.Inference/{self.word()}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", metadata=self.headers(), timeout=30)
        assert caught.value.code() is Code.UNIMPLEMENTED

    async def good_request(self) -> None:
        """One that is answered."""
        request = chat_request(self.word(), 1, k=1, request_id=self.word())
        assert await read_all(self._gateway, request, self.headers()) == 1

    async def _fails(self, request: pb.GenerateRequest, code: grpc.StatusCode) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._gateway.stub.Generate(request, metadata=self.headers(), timeout=30).read()
        assert caught.value.code() is code


def series(registry: CollectorRegistry) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """All series of a scrape, which must be small."""
    scrape = scrape_registry(registry)
    assert scrape.size < MAX_SCRAPE_BYTES
    return set(scrape.samples)


def registries(stack: TracedStack) -> dict[str, CollectorRegistry]:
    """Of the three services."""
    return {
        "gateway": stack.gateway.service.registry,
        "target": stack.target.service.registry,
        "draft": stack.drafter.registry,
    }


async def all_of(calls: Iterator[Callable[[], Awaitable[None]]]) -> None:
    """At most AT_ONCE at a time."""

    async def work() -> None:
        for call in calls:
            await call()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


@pytest.mark.timeout(120)
async def test_nothing_that_clients_send_becomes_a_label(tiny_model: Path) -> None:
    """2,000 requests that agree in nothing, at all services, and as many series as before."""
    async with traced_stack(tiny_model, traced=False, kv_tokens=8192) as stack:
        client = Client(stack.gateway)
        await client.good_request()
        before = {name: series(registry) for name, registry in registries(stack).items()}
        kinds = [client.unknown_model, client.bad_role, client.unknown_method] * 6
        kinds += [client.good_request]
        await all_of(kinds[n % len(kinds)] for n in range(NUM_REQUESTS))
        for name, registry in registries(stack).items():
            after = series(registry)
            assert before[name] <= after and len(after - before[name]) <= A_HANDFUL, name
            labels = {value for _, pairs in after for _, value in pairs}
            assert not labels & client.said
            assert not [value for value in labels if "/" in value or "127.0.0.1" in value]
        now = scrape_registry(stack.gateway.service.registry)
        assert now("requests_failed_by_code_total", code="not_found") > NUM_REQUESTS / 4


async def test_paths_of_the_admin_port_are_no_labels(tiny_model: Path) -> None:
    """Whoever asks for pages that there are not adds nothing to the one that there is."""
    settings = GatewaySettings(model=str(tiny_model), targets=f"{HOST}:1", http_port=-1)
    service = GatewayService(settings)
    async with listening(service, HOST, 0, (HOST, 0)) as running:
        before = series(service.registry)
        for number in range(100):
            status = await asyncio.to_thread(
                status_of, f"http://{HOST}:{running.admin_port}/w{number}/metrics?w={number}"
            )
            assert status == 404
        assert series(service.registry) == before


def status_of(url: str) -> int:
    """Of a page that there is not."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=10)
    caught.value.close()
    return caught.value.code
