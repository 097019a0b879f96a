"""Prompts of thousands of tokens beside short texts: everybody goes on, and probes are answered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from target_service.request import Request
from target_service.scheduler import Plan
from tests.support.in_process import running_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, random_prompts

LONG = random_prompts([7000, 7000, 7000], seed=1)
SHORT = random_prompts([5, 9, 30, 60], seed=2)
HEALTH_S = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of 8,192 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=8192)


class Steps:
    """Who took part in each step, as the device got it, and how long the prompts took."""

    def __init__(self) -> None:
        self.taking_part: list[set[Request]] = []
        self.longest_gap: dict[Request, int] = {}

    def note(self, plan: Plan, running: list[Request]) -> None:
        """Count for each text that has begun how long it has been left out."""
        present = {share.request for share in plan.shares}
        self.taking_part.append(present)
        for request in running:
            if request.num_generated:
                gap = 0 if request in present else self.longest_gap.get(request, 0) + 1
                assert gap < 2, "a text was left out of two steps in a row"
                self.longest_gap[request] = gap


async def watch_health(address: str, done: asyncio.Event) -> list[float]:
    """Seconds of one probe after another."""
    seconds = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not done.is_set():
            started = time.monotonic()
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            seconds.append(time.monotonic() - started)
            await asyncio.sleep(0.05)
    return seconds


@pytest.mark.timeout(180)
async def test_short_texts_go_on_beside_long_prompts(model: Path) -> None:
    """No text that has begun misses two steps in a row, each is as if alone, and every probe is
    answered within half a second."""
    async with running_target(model, kv_tokens=8192) as alone:
        expected = [await alone.ids(make_request(prompt, 150)) for prompt in SHORT]
        after_long = await alone.ids(make_request(LONG[0], 5))
    async with running_target(model, kv_tokens=32768) as target:
        steps, done = Steps(), asyncio.Event()
        batcher = target.service.batcher
        assert batcher is not None
        run_step = batcher._run_step

        def noted(plan: Plan) -> object:
            steps.note(plan, list(batcher.scheduler.running))
            return run_step(plan)

        batcher._run_step = noted
        probes = asyncio.create_task(watch_health(target.address, done))
        short = [asyncio.create_task(target.ids(make_request(each, 150), 150)) for each in SHORT]
        await asyncio.sleep(0.2)
        long = [asyncio.create_task(target.ids(make_request(each, 5), 150)) for each in LONG]
        assert await asyncio.gather(*short) == expected
        answers = await asyncio.gather(*long)
        done.set()
        assert answers[0] == after_long
        assert max(await probes) < HEALTH_S
        together = [each for each in steps.taking_part if len(each) > 1]
        assert len(together) > 40, "the prompts and the texts did not run together"
