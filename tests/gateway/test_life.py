"""Streams and targets that come and go: cancellation, deadlines, loss, slow readers, load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs

from outrider.serving.channel import open_channel
from outrider.serving.errors import EngineFailed, Unavailable
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc
from tests.support.gateways import Answer, gateway_on, gateway_with, target_status, until
from tests.support.scripted_target import SERVICE, Script, serving

REQUEST = pb.GenerateRequest(text="x")
LONG = [5] * 200


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_client_cancel_reaches_the_target(tiny_folder: Path, num_read: int) -> None:
    """A cancelled stream ends the target's call at once, also before its first token."""
    script = Script(LONG, delay_s=0.02)
    if num_read == 0:
        script.gate = asyncio.Event()
    async with gateway_with(tiny_folder, script) as (gateway, target):
        call = gateway.stub.Generate(REQUEST)
        for _ in range(num_read):
            await call.read()
        await until(lambda: target.seen.running == 1)
        call.cancel()
        await until(lambda: target.seen.running == 0, timeout_s=1)
        assert target.seen.cancelled == 1
        await until(lambda: gateway.num_running == 0)


async def test_closing_the_channel_reaches_the_target(tiny_folder: Path) -> None:
    """A client that goes away without a word counts as a cancel."""
    script = Script(LONG, delay_s=0.02)
    async with gateway_with(tiny_folder, script) as (gateway, target):
        call = gateway.stub.Generate(REQUEST)
        await call.read()
        await gateway.channel.close()
        await until(lambda: target.seen.running == 0)
        assert target.seen.cancelled == 1


async def test_the_deadline_travels(tiny_folder: Path) -> None:
    """The target gets the client's remaining time; when it is over both calls end."""
    script = Script(LONG, hang_after=2)
    async with gateway_with(tiny_folder, script) as (gateway, target):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ask(REQUEST, timeout_s=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < target.seen.time_remaining_s[0] < 0.51  # it travels in whole milliseconds
        await until(lambda: target.seen.running == 0, timeout_s=1)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(LONG, fail_after=3), grpc.StatusCode.UNAVAILABLE),
        (
            Script(LONG, fail_after=3, failure=Unavailable("gone")),
            grpc.StatusCode.UNAVAILABLE,
        ),
        (
            Script(LONG, fail_after=3, failure=EngineFailed("step failed")),
            grpc.StatusCode.INTERNAL,
        ),
        (Script(LONG, first_index_shift=1), grpc.StatusCode.INTERNAL),
        (Script(LONG, first_index_shift=-1), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_broken_answer_is_never_silent(
    tiny_folder: Path, script: Script, code: grpc.StatusCode
) -> None:
    """A target that stops, fails, skips or repeats tokens ends the stream with an error."""
    async with gateway_with(tiny_folder, script) as (gateway, _):
        answer = Answer()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in gateway.stub.Generate(REQUEST, timeout=5):
                answer.add(response)
        assert caught.value.code() is code
        assert answer.finish is None
        assert answer.ids == LONG[: 1 if script.first_index_shift else 3]


async def test_target_lost_and_back(tiny_folder: Path) -> None:
    """A target's death ends its streams with UNAVAILABLE; its return is noticed by itself."""
    script, status = Script(LONG, delay_s=0.02), target_status(tiny_folder)
    async with serving(script, status) as target:
        port = int(target.address.rpartition(":")[2])
        async with gateway_on(tiny_folder, [target.address]) as gateway:
            await gateway.wait_health(True)
            call = gateway.stub.Generate(REQUEST, timeout=10)
            stream = aiter(call)
            await anext(stream)
            stopping = asyncio.create_task(target.stop())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await stopping
            await gateway.wait_health(False)
            async with serving(Script([5, 6]), status, port=port):
                await gateway.wait_health(True, timeout_s=10)
                assert (await gateway.ask(REQUEST)).ids == [5, 6]


async def test_a_target_that_may_still_start_is_waited_for(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of information as long as that is normal, then one warning that says why."""
    monkeypatch.setattr("gateway.target_client._START_S", 0.6)
    with capture_logs() as lines:
        async with gateway_on(tiny_folder, ["127.0.0.1:1"]):
            await until(lambda: any(line["log_level"] == "warning" for line in lines))
    told = [line for line in lines if line.get("address") == "127.0.0.1:1"]
    assert [(line["log_level"], line["event"]) for line in told] == [
        ("info", "waiting for the target"),
        ("warning", "target is not ready"),
    ]
    assert "UNAVAILABLE" in told[1]["reason"]


async def test_a_target_that_was_there_is_missed_at_once(tiny_folder: Path) -> None:
    """Its loss is no start."""
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script([5])) as (gateway, target):
            await gateway.wait_health(True)
            await target.stop()
            await gateway.wait_health(False)
            await until(lambda: any(line["event"] == "target is not ready" for line in lines))
            events = [line["event"] for line in lines if line.get("address") == target.address]
    assert events[0] == "target is ready"
    assert "waiting for the target" not in events


async def test_target_health_is_the_gateways(tiny_folder: Path) -> None:
    """NOT_SERVING at the only target makes the gateway NOT_SERVING, and back."""
    async with gateway_with(tiny_folder, Script([5])) as (gateway, target):
        await target.set_serving(False)
        await gateway.wait_health(False)
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_SERVING"):
            await gateway.ask(REQUEST)
        await target.set_serving(True)
        await gateway.wait_health(True)
        assert (await gateway.ask(REQUEST)).ids == [5]


async def test_what_nobody_expected_does_not_end_the_watch(tiny_folder: Path) -> None:
    """A target that says what has no name is not used, and its return is noticed all the same."""
    async with gateway_with(tiny_folder, Script([5])) as (gateway, target):
        await target.health.set(SERVICE, 99)
        await gateway.wait_health(False)
        with pytest.raises(grpc.aio.AioRpcError, match="unexpected ValueError"):
            await gateway.ask(REQUEST)
        await target.set_serving(True)
        await gateway.wait_health(True)
        assert (await gateway.ask(REQUEST)).ids == [5]


async def test_a_target_with_another_vocabulary_is_not_used(tiny_folder: Path) -> None:
    """Ids of one tokenizer mean nothing to another model: both hashes are named."""
    status = target_status(tiny_folder)
    status.token_table_hash = b"\x01" * 32
    async with (
        serving(Script([5]), status) as target,
        gateway_on(tiny_folder, [target.address]) as gateway,
    ):
        await gateway.wait_health(False)
        links = gateway.service._targets._links
        await until(lambda: "token table" in links[0].reason)
        with pytest.raises(grpc.aio.AioRpcError, match="0101010101") as caught:
            await gateway.ask(REQUEST)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not target.seen.requests


async def test_two_targets_take_turns(tiny_folder: Path) -> None:
    """Requests go round the ready targets; one that is away is left out."""
    status = target_status(tiny_folder)
    async with serving(Script([5]), status) as one, serving(Script([5]), status) as two:
        addresses = [one.address, "127.0.0.1:1", two.address]
        async with gateway_on(tiny_folder, addresses) as gateway:
            await until(
                lambda: sum(link.info is not None for link in gateway.service._targets._links) == 2
            )
            for _ in range(6):
                await gateway.ask(REQUEST)
        assert [len(one.seen.requests), len(two.seen.requests)] == [3, 3]


async def test_too_many_at_once(tiny_folder: Path) -> None:
    """Beyond the limit: RESOURCE_EXHAUSTED with a delay, and room again when one has ended."""
    gate = asyncio.Event()
    script = Script([5], gate=gate)
    async with gateway_with(tiny_folder, script, max_concurrent=2) as (gateway, target):
        running = [asyncio.create_task(gateway.ask(REQUEST)) for _ in range(2)]
        await until(lambda: target.seen.running == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ask(REQUEST)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[0].Unpack(retry)
        gate.set()
        assert [answer.ids for answer in await asyncio.gather(*running)] == [[5], [5]]
        assert (await gateway.ask(REQUEST)).ids == [5]


async def test_a_slow_reader_holds_up_only_itself(tiny_folder: Path) -> None:
    """While a client does not read, its target stream stands still; later nothing is missing."""
    ids = [5] * 250 * 1000
    script = Script(ids, block=250)
    status = target_status(tiny_folder)
    status.max_model_len = 2 * len(ids)
    async with (
        serving(script, status) as target,
        gateway_on(tiny_folder, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        answer, stream = Answer(), aiter(gateway.stub.Generate(REQUEST, timeout=15))
        answer.add(await anext(stream))
        before = -1
        while target.seen.tokens_sent != before:  # until the windows are full
            before = target.seen.tokens_sent
            await asyncio.sleep(0.3)
        assert before < len(ids) / 2
        script.ids = [5, 6]
        assert (await gateway.ask(REQUEST)).ids == [5, 6]
        async for response in stream:
            answer.add(response)
        assert len(answer.ids) == len(ids)
        assert answer.finish.usage.completion_tokens == len(ids)


@pytest.mark.parametrize("reads_on", [True, False])
async def test_a_reader_that_has_stopped_loses_its_stream(
    tiny_folder: Path, reads_on: bool
) -> None:
    """Its place is free and its target idle after `stall_s`; it learns why when it reads on."""
    ids = [5] * 250 * 1000
    script, status = Script(ids, block=250), target_status(tiny_folder)
    status.max_model_len = 2 * len(ids)
    async with (
        serving(script, status) as target,
        gateway_on(tiny_folder, [target.address], max_concurrent=1, stall_s=0.3) as gateway,
    ):
        await gateway.wait_health(True)
        async with open_channel(gateway.address) as channel:
            answer = Answer()
            stream = aiter(inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST))
            answer.add(await anext(stream))
            await until(lambda: target.seen.running == 0)
            assert target.seen.cancelled == 1
            await until(lambda: gateway.num_running == 0, timeout_s=0.2)
            script.ids = [5, 6]
            assert (await gateway.ask(REQUEST)).ids == [5, 6]
            if reads_on:
                with pytest.raises(grpc.aio.AioRpcError, match="not read for 0.3 s") as caught:
                    async for response in stream:
                        answer.add(response)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert answer.finish is None and 250 < len(answer.ids) < len(ids)
        await until(lambda: not gateway.service._unread._aborts)


async def test_a_slow_target_is_not_a_stalled_reader(tiny_folder: Path) -> None:
    """Only the time counts in which a message waits for its client, and for each one anew."""
    script = Script(LONG[:5], delay_s=0.15)
    async with gateway_with(tiny_folder, script, stall_s=0.1) as (gateway, _):
        assert (await gateway.ask(REQUEST)).ids == LONG[:5]


@pytest.mark.parametrize(("limit_s", "client_s"), [(0.3, None), (0.3, 5), (5, 0.3), (0, 0.3)])
async def test_the_nearer_deadline_counts(
    tiny_folder: Path, limit_s: float, client_s: float | None
) -> None:
    """A request has the gateway's own deadline, also if its client sets none, or a later one."""
    script = Script(LONG, hang_after=2)
    async with gateway_with(tiny_folder, script, request_timeout_s=limit_s) as (gateway, target):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(5):
                async for _ in gateway.stub.Generate(REQUEST, timeout=client_s):
                    pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < target.seen.time_remaining_s[0] < 0.31
        await until(lambda: target.seen.running == 0, timeout_s=1)


async def test_draining_refuses_new_requests_and_ends_running_ones(tiny_folder: Path) -> None:
    """After drain: UNAVAILABLE for new calls, while the running stream comes to its end."""
    gate = asyncio.Event()
    async with gateway_with(tiny_folder, Script([5, 6], gate=gate)) as (gateway, target):
        running = asyncio.create_task(gateway.ask(REQUEST))
        await until(lambda: target.seen.running == 1)
        await gateway.service.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await gateway.ask(REQUEST)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.set()
        assert (await running).ids == [5, 6]
