"""The gateway in front of the real target and drafter: drafts change nothing that a client sees.

text, chunks, stop strings, finish reasons and usage are the same with speculation off and on
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Gateway, until
from tests.support.in_process import Target
from tests.support.stacks import ask, full_stack
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; greedy, it soon repeats itself, so n-gram drafts are good."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def stack(tiny_model: Path) -> AsyncIterator[tuple[Gateway, Target]]:
    """All three services."""
    async with full_stack(tiny_model) as both:
        yield both


async def test_off_and_on_say_the_same(stack: tuple[Gateway, Target]) -> None:
    """Same ids, same text; with drafts some are accepted."""
    gateway, _ = stack
    off = await ask(gateway, "one river runs", 0, max_tokens=60)
    for k in (1, 4, 8):
        on = await ask(gateway, "one river runs", k, max_tokens=60)
        assert (on.ids, on.text, on.reason) == (off.ids, off.text, "LENGTH")
        assert on.finish.speculation.accepted > 0


async def test_stops_off_and_on(stack: tuple[Gateway, Target]) -> None:
    """Stop strings that lie anywhere in the text, under any cap: the same end with drafts."""
    gateway, target = stack
    text = (await ask(gateway, "The sea", 0, max_tokens=40)).text
    for start, max_tokens in [(3, 40), (10, 40), (17, 20), (30, 40), (30, 12)]:
        stop = [text[start : start + 4], text[start + 1 : start + 3] + "never"]
        off = await ask(gateway, "The sea", 0, max_tokens=max_tokens, stop=stop)
        on = await ask(gateway, "The sea", 6, max_tokens=max_tokens, stop=stop)
        assert (on.ids, on.text, on.reason) == (off.ids, off.text, off.reason)
        if off.reason == "STOP":
            assert off.text == text[: text.index(stop[0])]
    await until(lambda: not target.service.batcher.scheduler.running)


async def test_cancelled_requests_leave_nothing(stack: tuple[Gateway, Target]) -> None:
    """60 streams, left at different moments: no task, call or block stays behind."""
    gateway, target = stack
    request = pb.GenerateRequest(
        text="The sea", stopping=sampling_pb2.StoppingParams(max_tokens=300, ignore_eos=True)
    )
    await gateway.ask(request, timeout_s=60)
    before = len(asyncio.all_tasks())

    async def leave_after(num_messages: int) -> None:
        call = gateway.stub.Generate(request, timeout=60)
        async for _ in call:
            num_messages -= 1
            if num_messages <= 0:
                break
        call.cancel()

    for _ in range(3):
        await asyncio.gather(*(leave_after(i % 7) for i in range(20)))
    scheduler = target.service.batcher.scheduler
    await until(lambda: not scheduler.running and scheduler.pool.num_used == 0)
    await until(lambda: gateway.num_running == 0)
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert (await target.status()).load.cancelled > 0
