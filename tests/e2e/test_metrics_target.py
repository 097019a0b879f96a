"""A target process and two drafter processes under load, scraped over HTTP until the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import target_pb2, target_pb2_grpc
from tests.support.processes import ServiceProcess, running_process
from tests.support.scrapes import Scrape, scrape
from tests.support.target_sums import check_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, random_prompts
from tests.support.token_streams import AUTO, greedy, wait_until

pytestmark = pytest.mark.timeout(180)

NUM_STREAMS = 12
LENGTH = 120


async def read(stub: target_pb2_grpc.TargetStub, request: target_pb2.TokenRequest) -> int:
    """The tokens of all choices of a request."""
    return sum([len(chunk.tokens) async for chunk in stub.Generate(request, timeout=120)])


async def watch(target: ServiceProcess, scrapes: list[Scrape]) -> None:
    """Scrape for ever; each one adds up and no counter is lower than before."""
    while True:
        scrapes.append(await scrape(target.metrics_port))
        check_target(scrapes[-1], scrapes[-2] if len(scrapes) > 1 else None)
        await asyncio.sleep(0.02)


async def test_scrapes_add_up_while_a_drafter_dies(tmp_path: Path) -> None:
    """Streams that end, three choices, clients that leave, a request that is refused; in the middle
    one of two drafters is killed. What the metrics say in the end is what the clients were told."""
    model = make_tiny_model(tmp_path / "model", max_len=2048)
    prompts = random_prompts([10 + i for i in range(NUM_STREAMS)])
    async with (
        running_process("draft", tmp_path) as first,
        running_process("draft", tmp_path) as second,
        running_process(
            "target",
            tmp_path,
            model=model,
            drafters=f"{first.address},{second.address}",
            kv_tokens=1024,
        ) as target,
        open_channel(target.address) as channel,
    ):
        stub = target_pb2_grpc.TargetStub(channel)

        async def ready(count: int) -> bool:
            return (await scrape(target.metrics_port))("drafters", state="ready") == count

        await wait_until(lambda: ready(2), 30)
        scrapes: list[Scrape] = []
        watching = asyncio.create_task(watch(target, scrapes))
        several = make_request(prompts[0], LENGTH, temperature=1.0, seed=7)
        several.n = 3
        requests = [*(greedy(each, LENGTH, AUTO) for each in prompts), several]
        streams = [asyncio.create_task(read(stub, each)) for each in requests]
        leaving = stub.Generate(greedy(prompts[1], 1500, AUTO), timeout=120)
        await leaving.read()
        first.kill()
        leaving.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await read(stub, target_pb2.TokenRequest())
        counts = await asyncio.gather(*streams)
        await wait_until(lambda: ready(1), 30)

        async def quiet() -> bool:
            now = await scrape(target.metrics_port)
            return not now("requests_running") + now("requests_waiting")

        await wait_until(quiet, 10)
        assert not watching.done(), watching.exception()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        now = await scrape(target.metrics_port)
        check_target(now, scrapes[-1])
        assert counts == [LENGTH] * NUM_STREAMS + [3 * LENGTH]
        assert now.by("requests_total", "outcome") == {
            "finished": NUM_STREAMS + 3,
            "failed": 0,
            "cancelled": 1,
        }
        lines = [event for event in target.events if event["event"] == "request"]
        assert now("tokens_total", kind="generated") == sum(
            line["generated_tokens"] for line in lines
        )
        assert now("spec_decode_num_accepted_tokens_total") == sum(
            line["accepted"] for line in lines
        )
        assert sorted(line["outcome"] for line in lines) == [
            "cancelled",
            *["finished"] * (NUM_STREAMS + 1),
            "refused",
        ]
        assert now("spec_decode_num_draft_tokens_total") > 0
        assert now("engine_up") == 1
        assert len(scrapes) > 5 and now.size < 200_000

        target.terminate()
        assert await target.wait_exit() == 0
