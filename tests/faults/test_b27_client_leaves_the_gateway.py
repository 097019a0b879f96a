"""B27 at the gateway: a client of HTTP or gRPC leaves, and its work and its blocks stay.

The six ways in which the public reports have clients leave, and two more that HTTP has. Right: as
in test_b27_client_leaves.py, and nothing is left at the gateway either: no connection, no place
under a limit, no open call, no load that it thinks the target has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2
from tests.support.gateways import gateway_on, until
from tests.support.http_gateway import COMPLETIONS, HttpAnswer, HttpClient, HttpGateway
from tests.support.http_streams import HttpStream, completion, http_front, read_all
from tests.support.leaving import (
    MAX_SEQUENCES,
    Server,
    best_latency_s,
    check_all_is_free,
    serving,
)
from tests.support.tiny_models import make_tiny_model
from tests.support.token_streams import wait_until

pytestmark = pytest.mark.timeout(60)

CAP = 2000
SHORT = completion([9, 8, 7], 12, speculation={"mode": "off"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for 2,000 tokens behind a long prompt."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=4096)


@dataclass(frozen=True)
class Front:
    """A gateway, and what is behind it."""

    http: HttpGateway
    server: Server

    async def streams(self, count: int, prompt_len: int = 3) -> list[HttpStream]:
        """That many requests, each on a connection of its own."""
        port = self.http.server.port
        bodies = [completion(prompt(i, prompt_len), CAP) for i in range(count)]
        return list(await asyncio.gather(*(HttpStream.open(port, body) for body in bodies)))

    async def running(self, count: int) -> tuple[list[HttpStream], list[HttpStream]]:
        """Those that have a first chunk, as many as can run, and those that wait behind them."""
        streams = await self.streams(count)
        reading = {asyncio.create_task(each.read_first()): each for each in streams}
        async with asyncio.timeout(10):
            while sum(task.done() for task in reading) < min(count, MAX_SEQUENCES):
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=0.001)
        begun = [each for task, each in reading.items() if task.done()]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return begun, [each for each in streams if each not in begun]


@contextlib.asynccontextmanager
async def in_front(model: Path) -> AsyncIterator[Front]:
    """All three services in this process."""
    async with (
        serving(model) as server,
        gateway_on(model, [server.target.address], http_port=0) as gateway,
        http_front(gateway) as http,
    ):
        await gateway.wait_health(True)
        yield Front(http, server)


def prompt(number: int, length: int) -> list[int]:
    """One that nobody else has."""
    return [5 + (number * 7 + i * (number + 1)) % 370 for i in range(length)]


async def reset_after_the_first_chunk(front: Front, count: int) -> None:
    """RST in mid-stream, as from a client that has crashed."""
    begun, waiting = await front.running(count)
    for stream in begun + waiting:
        stream.client.reset()


async def close_after_the_first_chunk(front: Front, count: int) -> None:
    """FIN in mid-stream, as from one that was closed."""
    begun, waiting = await front.running(count)
    for stream in begun + waiting:
        stream.close()


async def close_during_prefill(front: Front, count: int) -> None:
    """While long prompts are computed, before any token and so before the answer's head."""
    before = (await front.server.target.status()).load
    streams = await front.streams(count, prompt_len=1500)

    async def prefilling() -> bool:
        load = (await front.server.target.status()).load
        everybody = load.started == before.started + count
        return everybody and load.prefilled_tokens > before.prefilled_tokens

    await wait_until(prefilling, 10, every_s=0.001)
    for stream in streams:
        stream.close()
    await check_all_is_free(front.server)
    assert (await front.server.target.status()).load.generated_tokens == before.generated_tokens


async def close_while_queued(front: Front, count: int) -> None:
    """Every slot is taken by others, who must not notice that those behind them leave."""
    running, _ = await front.running(MAX_SEQUENCES)
    queued = await front.streams(count)
    await front.server.wait_waiting(count, 5)
    for stream in queued:
        stream.close()
    await front.server.wait_waiting(0, 2)
    assert (await front.server.target.status()).load.running == MAX_SEQUENCES
    for stream in running:
        assert await asyncio.wait_for(stream.read(), 5), "one that runs has ended"
        stream.close()


async def give_up_a_whole_answer(front: Front, count: int) -> None:
    """A client that wants no stream and has a time limit of its own hangs up."""

    async def ask(number: int) -> None:
        client = await HttpClient.connect(front.http.server.port)
        await client.send("POST", COMPLETIONS, completion(prompt(number, 3), CAP))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.answer(), 0.3)
        client.close()

    await asyncio.gather(*(ask(number) for number in range(count)))


async def name_a_time_limit(front: Front, count: int) -> None:
    """The gateway knows the limit, and tells the client when it is over."""

    async def ask(number: int) -> HttpAnswer:
        client = await HttpClient.connect(front.http.server.port)
        body = completion(prompt(number, 3), CAP)
        answer = await client.ask("POST", COMPLETIONS, body, {"X-Request-Timeout": "0.3"})
        client.close()
        return answer

    for answer in await asyncio.gather(*(ask(number) for number in range(count))):
        assert answer.status == 504
        assert answer.error["code"] == "timeout"


def ask_over_grpc(channel: grpc.aio.Channel, count: int, timeout_s: float) -> list:
    """Calls of the same requests."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    return [
        stub.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt(number, 3)),
                sampling=sampling_pb2.SamplingParams(temperature=0),
                stopping=sampling_pb2.StoppingParams(max_tokens=CAP, ignore_eos=True),
            ),
            timeout=timeout_s,
        )
        for number in range(count)
    ]


async def cancel_over_grpc(front: Front, count: int) -> None:
    """Explicit cancels, in mid-stream."""
    async with open_channel(front.http.gateway.address) as channel:
        calls = ask_over_grpc(channel, count, 60)
        reads = [asyncio.create_task(call.read()) for call in calls]
        async with asyncio.timeout(10):
            while sum(task.done() for task in reads) < min(count, MAX_SEQUENCES):
                await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=0.001)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        assert {await call.code() for call in calls} == {grpc.StatusCode.CANCELLED}


async def let_grpc_deadlines_pass(front: Front, count: int) -> None:
    """Each call has a deadline far below what it needs."""

    async def read(call: grpc.aio.UnaryStreamCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass

    async with open_channel(front.http.gateway.address) as channel:
        calls = ask_over_grpc(channel, count, 0.4)
        await asyncio.gather(*map(read, calls))
        assert {await call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}


WAYS: dict[str, Callable[[Front, int], Awaitable[None]]] = {
    "reset_after_the_first_chunk": reset_after_the_first_chunk,
    "close_after_the_first_chunk": close_after_the_first_chunk,
    "close_during_prefill": close_during_prefill,
    "close_while_queued": close_while_queued,
    "give_up_a_whole_answer": give_up_a_whole_answer,
    "name_a_time_limit": name_a_time_limit,
    "cancel_over_grpc": cancel_over_grpc,
    "let_grpc_deadlines_pass": let_grpc_deadlines_pass,
}


async def check_nothing_is_left(front: Front) -> None:
    """At the target, at the drafter and at the gateway."""
    await check_all_is_free(front.server)
    http = front.http
    await until(lambda: http.server.num_connections == 0, timeout_s=2)
    assert http.gateway.num_running == 0
    assert not http.calls._calls
    assert [link.num_held for link in http.gateway.service._targets._links] == [0]


async def ask_short(front: Front) -> str:
    """The text of a short answer."""
    client = await HttpClient.connect(front.http.server.port)
    answer = await client.ask("POST", COMPLETIONS, SHORT)
    client.close()
    assert answer.status == 200
    return answer.json["choices"][0]["text"]


@pytest.mark.parametrize("way", WAYS)
async def test_whoever_leaves_leaves_nothing_behind(way: str, model: Path) -> None:
    """Each way of leaving frees everything within 2 s, counts as cancelled, and the next request
    gives what it gave before."""
    count = MAX_SEQUENCES + 2  # so that some of them wait
    async with in_front(model) as front:
        expected = await ask_short(front)
        before = (await front.server.target.status()).load.cancelled
        await WAYS[way](front, count)
        await check_nothing_is_left(front)
        cancelled = (await front.server.target.status()).load.cancelled - before
        assert cancelled == count + (MAX_SEQUENCES if way == "close_while_queued" else 0)
        assert await ask_short(front) == expected


async def test_who_reads_on_meanwhile_has_a_whole_answer(model: Path) -> None:
    """Half of the clients crash in mid-stream; the others miss nothing."""
    async with in_front(model) as front:
        port = front.http.server.port
        bodies = [completion(prompt(i, 3), 150) for i in range(5)]
        alone = [await HttpStream.open(port, body) for body in bodies]
        await read_all(alone, 20)
        kept = [await HttpStream.open(port, body) for body in bodies]
        leaving, _ = await front.running(5)
        for stream in leaving:
            stream.client.reset()
        await read_all(kept, 20)
        assert all(stream.whole for stream in kept)
        assert [stream.text for stream in kept] == [stream.text for stream in alone]
        for stream in alone + kept:
            stream.close()
        await check_nothing_is_left(front)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_eighty_requests_leave_five_times_over(model: Path) -> None:
    """80 requests of 2,000 tokens, ten a way of leaving, five times on one gateway: all is free
    after each way, and a short request is then within 20 % of its time on the fresh one."""
    async with in_front(model) as front:
        await best_latency_s(lambda: ask_short(front))  # warm
        fresh_s = await best_latency_s(lambda: ask_short(front))
        for _ in range(5):
            for leave in WAYS.values():
                await leave(front, 10)
                await check_nothing_is_left(front)
        assert await best_latency_s(lambda: ask_short(front)) <= 1.2 * fresh_s
