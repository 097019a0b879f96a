"""How the command line is connected to its gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest

from outrider.cli.client import Client, Question
from outrider.client.answers import Chunk
from outrider.serving import channel
from tests.support.relay import Relay
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway

WAIT_S = 15.0


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    """A scripted one."""
    with scripted_gateway() as script:
        yield script


async def test_a_gateway_that_vanishes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, gateway: ScriptedGateway
) -> None:
    """Its machine is gone, so that not even its connection ends: pings find that out long before
    the time of the request is over."""
    monkeypatch.setattr(channel, "_KEEPALIVE_MS", 200)
    monkeypatch.setattr(channel, "_KEEPALIVE_TIMEOUT_MS", 100)
    gateway.hang = True
    async with Relay(gateway.address) as relay:
        with Client(relay.address) as client:
            events = client.generate(Question(text="x"), timeout_s=WAIT_S)
            assert isinstance(await asyncio.to_thread(next, events), Chunk)
            started_s = time.monotonic()
            relay.drop()
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(next, events)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started_s < WAIT_S / 2


def test_how_long_a_prompt_may_be_is_the_gateways_to_say(gateway: ScriptedGateway) -> None:
    """A larger message than usual is sent, and this gateway refuses it."""
    with Client(gateway.address) as client, pytest.raises(grpc.RpcError) as caught:
        list(client.generate(Question(text="x" * 2**23), timeout_s=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "received message" in caught.value.details().lower()
