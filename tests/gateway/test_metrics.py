"""Every request and every token is in one place in every scrape, and the figures are the right
ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest

from gateway.tokenizer import ModelTokenizer
from outrider.serving.channel import open_channel
from outrider.serving.errors import EngineFailed, Overloaded
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2
from tests.support.gateways import Gateway, gateway_on, gateway_with, target_status, until
from tests.support.scrapes import Scrape, scrape_registry
from tests.support.scripted_target import Script, serving
from tests.support.sums import assert_gateway_adds_up

LONG = [5] * 200


def read(gateway: Gateway) -> Scrape:
    """What a scrape shows now."""
    return scrape_registry(gateway.service.registry)


def tokens(gateway: Gateway) -> dict[str, float]:
    """By kind, and those that are held."""
    now = read(gateway)
    return now.by("tokens_total", "kind") | {"held": now("tokens_held")}


def asking(max_tokens: int = 5, **fields: object) -> pb.GenerateRequest:
    """A plain request."""
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens)
    return pb.GenerateRequest(**{"text": "x", "stopping": stopping, **fields})


async def fails(call: Awaitable[object], code: grpc.StatusCode) -> None:
    """It does, with this code."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code


@contextlib.asynccontextmanager
async def scraped(gateway: Gateway) -> AsyncIterator[None]:
    """While the block runs the sums hold and nothing falls, at any moment."""

    async def watch() -> None:
        before = None
        while True:
            now = read(gateway)
            now.check_numbers(before)
            assert_gateway_adds_up(now)
            before = now
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def test_every_way_to_end_is_counted_once(tiny_folder: Path) -> None:
    """Outcomes, codes and reasons are exact, and the sums hold in every scrape on the way."""
    script = Script(LONG, block=3, delay_s=0.002)
    async with gateway_with(tiny_folder, script, max_concurrent=4) as (gateway, target):
        async with scraped(gateway):
            await asyncio.gather(*(gateway.ask(asking()) for _ in range(3)))
            for ids in ([5] * 40, [7, 2]):
                script.ids, script.eos_ids = ids, [2]
                await gateway.ask(asking(40))
            script.ids = LONG
            await fails(gateway.ask(asking(0)), grpc.StatusCode.INVALID_ARGUMENT)
            await fails(gateway.ask(asking(model="other")), grpc.StatusCode.NOT_FOUND)
            malformed = gateway.channel.unary_stream("/outrider.v1.Inference/Generate")
            await fails(malformed(b"\xff\xff\xff").read(), grpc.StatusCode.INVALID_ARGUMENT)

            script.gate = asyncio.Event()
            calls = [gateway.stub.Generate(asking()) for _ in range(4)]
            await until(lambda: target.seen.running == 4)
            assert read(gateway)("requests_running") == 4
            await fails(gateway.ask(asking()), grpc.StatusCode.RESOURCE_EXHAUSTED)
            for call in calls:
                call.cancel()
            await until(lambda: read(gateway)("requests_running") == 0)
            await fails(gateway.ask(asking(), 0.2), grpc.StatusCode.DEADLINE_EXCEEDED)
            script.gate = None
            script.refuse = Overloaded("full", 1.0)
            await fails(gateway.ask(asking()), grpc.StatusCode.RESOURCE_EXHAUSTED)
            script.refuse, script.fail_after, script.failure = None, 3, EngineFailed("no")
            await fails(gateway.ask(asking()), grpc.StatusCode.INTERNAL)
            await target.set_serving(False)
            await gateway.wait_health(False)
            await fails(gateway.ask(asking()), grpc.StatusCode.UNAVAILABLE)
            await until(lambda: read(gateway)("requests_running") == 0)

        now = read(gateway)
        assert now.by("requests_total", "outcome") == {
            "finished": 5, "failed": 3, "cancelled": 4, "refused": 5,
        }  # fmt: skip
        codes = {k: v for k, v in now.by("requests_failed_by_code_total", "code").items() if v}
        assert codes == {
            "invalid_argument": 2, "not_found": 1, "resource_exhausted": 2,
            "deadline_exceeded": 1, "internal": 1, "unavailable": 1,
        }  # fmt: skip
        assert now.by("requests_finished_by_reason_total", "reason") == {"stop": 1, "length": 4}
        assert now("tokens_held") == now("telemetry_errors_total") == 0
        assert now("request_duration_seconds_count") == 12  # all but the refused ones
        assert now("time_per_output_token_seconds_count") == 5
        assert now("time_to_first_token_seconds_count") == 6  # one failed in the middle
        assert now.by("targets", "state") == {"ready": 0, "unready": 1}


async def test_tokens_of_prompts_and_answers(tiny_folder: Path) -> None:
    """What a client gets is delivered, and equals its usage."""
    ids = ModelTokenizer.load(tiny_folder).encode("The quick brown fox")
    async with gateway_with(tiny_folder, Script(ids, block=3)) as (gateway, _):
        usage = (await gateway.ask(asking(100, text="END of"))).finish.usage
        assert tokens(gateway) == {
            "prompt": usage.prompt_tokens, "cached_prompt": 0, "generated": len(ids),
            "delivered": usage.completion_tokens, "withheld": 0, "held": 0,
        }  # fmt: skip
        assert read(gateway).by("targets", "state") == {"ready": 1, "unready": 0}


async def test_tokens_behind_a_stop_string_are_withheld(tiny_folder: Path) -> None:
    """The target has made them, nobody gets them."""
    ids = ModelTokenizer.load(tiny_folder).encode("The quick brown fox jumps over the lazy dog.")
    async with gateway_with(tiny_folder, Script(ids, block=len(ids))) as (gateway, _):
        stopping = sampling_pb2.StoppingParams(stop=["fox"])
        answer = await gateway.ask(asking(stopping=stopping))
        await until(lambda: read(gateway)("requests_running") == 0)
        found = tokens(gateway)
    assert answer.text == "The quick brown "
    assert found["generated"] == len(ids)
    assert found["delivered"] == answer.finish.usage.completion_tokens < len(ids)
    assert found["withheld"] == len(ids) - found["delivered"]


async def test_tokens_that_wait_for_their_client_are_held(tiny_folder: Path) -> None:
    """A client that does not read makes them show; when it is given up they are withheld."""
    ids = [5] * 250 * 1000
    status = target_status(tiny_folder)
    status.max_model_len = 2 * len(ids)
    async with (
        serving(Script(ids, block=250), status) as target,
        gateway_on(tiny_folder, [target.address], stall_s=1.0) as gateway,
    ):
        await gateway.wait_health(True)
        async with scraped(gateway), open_channel(gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="x"))
            await call.read()
            await until(lambda: tokens(gateway)["held"] > 0)
            await until(lambda: read(gateway)("requests_running") == 0)
            now = read(gateway)
            assert now.by("requests_total", "outcome")["failed"] == 1
            assert now("requests_failed_by_code_total", code="unavailable") == 1
            assert now("tokens_held") == 0
            assert now.by("tokens_total", "kind")["withheld"] > 0


async def test_a_client_that_left_in_the_middle(tiny_folder: Path) -> None:
    """What it has not got is withheld, and no token is counted twice."""
    script = Script(LONG, block=5, delay_s=0.005)
    async with gateway_with(tiny_folder, script) as (gateway, target):
        async with scraped(gateway):
            for num_read in (0, 1, 4):
                call = gateway.stub.Generate(asking(200))
                for _ in range(num_read):
                    await call.read()
                call.cancel()
            await until(lambda: target.seen.running == 0)
            await until(lambda: read(gateway)("requests_running") == 0)
        found = tokens(gateway)
        assert found["held"] == 0
        assert found["delivered"] + found["withheld"] == found["generated"] < 3 * len(LONG)


async def test_times_are_those_of_the_request(tiny_folder: Path) -> None:
    """The first token comes late, the others at a steady pace."""
    script = Script([5] * 5, delay_s=0.05, gate=asyncio.Event())
    async with gateway_with(tiny_folder, script) as (gateway, _):
        asyncio.get_running_loop().call_later(0.3, script.gate.set)
        await gateway.ask(asking(5))
        await until(lambda: read(gateway)("requests_running") == 0)
        now = read(gateway)
        first_s = now("time_to_first_token_seconds_sum")
        each_s = now("time_per_output_token_seconds_sum")
        whole_s = now("request_duration_seconds_sum")
    assert first_s > 0.3
    assert each_s >= 0.05
    assert whole_s >= first_s + 4 * each_s


async def test_before_the_start_there_are_zeros(tiny_folder: Path) -> None:
    """A scrape of a gateway that is starting shows every series, so that rates see the first."""
    async with gateway_on(tiny_folder, ["127.0.0.1:1"]) as gateway:
        now = read(gateway)
        now.check_numbers()
        assert_gateway_adds_up(now)
        assert len(now.by("requests_failed_by_code_total", "code")) == 15
