"""B47: a reader that is slow, or has stopped.

Symptom: the output for a client that does not read piles up without bound, or the one loop waits
for it and every stream stands still. Right: the others keep their speed; what is made for such a
client is bounded; when it reads on, nothing is missing or doubled; when it never does, its stream
ends with a clear error and its blocks are free. Reported in public of several servers: queues that
grow until the process dies, a full queue that raises instead of waiting, one stalled client that
stops all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from protos.outrider.v1 import target_pb2, target_pb2_grpc
from tests.support.in_process import Target, running_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_streams import (
    OFF,
    TimedStream,
    assert_counts_balance,
    greedy,
    quiet_status,
    wait_until,
)

STREAM_TOKENS = 64
TOP = 20
MAX_STALLED_BYTES = 1_000_000


@dataclass
class Sizes:
    """How large a run is."""

    num_tokens: int
    num_stalled: int
    num_slow: int
    num_normal: int
    stall_s: float
    resumed_after_s: float
    """When one of the stalled ones reads on; less than `stall_s`."""
    slow_read_s: float


SMALL = Sizes(500, 2, 2, 4, stall_s=2.5, resumed_after_s=1.0, slow_read_s=0.3)
FULL = Sizes(4000, 5, 5, 10, stall_s=15.0, resumed_after_s=5.0, slow_read_s=1.0)


def request_of(number: int, num_tokens: int) -> target_pb2.TokenRequest:
    """A long answer with many log-probabilities, so that a token is some 300 bytes."""
    request = greedy([5 + number, 6, 7], num_tokens, OFF)
    request.logprobs = TOP
    return request


@dataclass
class Reader:
    """A client with a connection of its own, that reads when it is told to."""

    address: str
    request: target_pb2.TokenRequest
    ids: list[int] = field(default_factory=list)
    num_bytes: int = 0
    finished: bool = False

    async def __aenter__(self) -> Reader:
        # Without a window of its own for what it has not read, a stalled client shows sooner.
        options = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        self._call = target_pb2_grpc.TargetStub(self._channel).Generate(self.request, timeout=300)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def read(self) -> bool:
        """The next chunk, which must go on where the last one ended. False at the end."""
        chunk = await self._call.read()
        if chunk is grpc.aio.EOF:
            return False
        assert not self.finished
        assert chunk.first_index == len(self.ids), "a gap or a repeat"
        self.ids.extend(token.id for token in chunk.tokens)
        self.num_bytes += chunk.ByteSize()
        self.finished = chunk.HasField("finish")
        return True

    async def read_slowly(self, every_s: float) -> None:
        """A chunk now and then, for ever."""
        while await self.read():
            await asyncio.sleep(every_s)

    async def read_all(self) -> None:
        """To the end; raises how it ended if that was no good end."""
        while await self.read():
            pass
        assert await self._call.code() is grpc.StatusCode.OK
        assert self.finished


async def speed_of(
    target: Target, sizes: Sizes, numbers: Sequence[int], expected: list[list[int]]
) -> float:
    """Tokens a second of a stream, of those requests at once whose readers read at once."""
    streams = [TimedStream() for _ in numbers]
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for i, stream in zip(numbers, streams, strict=True):
            group.create_task(stream.run(target.stub, request_of(i, sizes.num_tokens), 300))
    assert [stream.ids for stream in streams] == [expected[i] for i in numbers]
    return sizes.num_tokens / (time.monotonic() - started_s)


def prompts_running(target: Target) -> set[tuple[int, ...]]:
    """Who holds blocks, by what they asked."""
    running = target.service.batcher.scheduler.running
    return {tuple(each.sequence.token_ids[:3]) for each in running}


def undelivered_bytes(target: Target, readers: list[Reader]) -> list[float]:
    """What has been made for each of these and not been read, by the size of what has."""
    made = {
        tuple(each.sequence.token_ids[:3]): each.num_generated
        for each in target.service.batcher.scheduler.running
    }
    unread = [made[tuple(each.request.token_ids)] - len(each.ids) for each in readers]
    return [
        count * each.num_bytes / len(each.ids) for count, each in zip(unread, readers, strict=True)
    ]


async def check_cut_off(reading: Awaitable[None], reader: Reader, ids: list[int]) -> None:
    """It ends with an error that says why, behind tokens without a gap."""
    with pytest.raises(grpc.aio.AioRpcError, match="was not read for") as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reader.ids == ids[: len(reader.ids)]


async def check(model: Path, sizes: Sizes) -> float:
    """The whole story; returns the normal readers' speed as a share of what it is without those
    who are slow or stay away. The one that reads on has a claim to its part of every step."""
    count = sizes.num_normal + sizes.num_slow + sizes.num_stalled
    normal, resumed = range(sizes.num_normal), count - sizes.num_stalled
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(
            running_target(
                model,
                kv_tokens=(sizes.num_tokens + 64) * count,
                stream_tokens=STREAM_TOKENS,
                stall_s=sizes.stall_s,
                prefix_cache=False,
            )
        )
        everybody = [request_of(i, sizes.num_tokens) for i in range(count)]
        expected = await asyncio.gather(*(target.ids(each, 300) for each in everybody))
        alone = await speed_of(target, sizes, [*normal, resumed], expected)
        others = [
            await stack.enter_async_context(Reader(target.address, each))
            for each in everybody[sizes.num_normal :]
        ]
        slow, stalled = others[: sizes.num_slow], others[sizes.num_slow :]
        for reader in stalled:
            for _ in range(3):
                await reader.read()
        slowly = [asyncio.create_task(each.read_slowly(sizes.slow_read_s)) for each in slow]
        stalled_s = time.monotonic()
        beside = asyncio.create_task(speed_of(target, sizes, normal, expected))
        await asyncio.sleep(stalled_s + sizes.resumed_after_s - time.monotonic())
        assert max(undelivered_bytes(target, stalled)) < MAX_STALLED_BYTES

        back, *gone = stalled
        await back.read_all()
        assert back.ids == expected[resumed]
        share = await beside / alone

        async def cut_off() -> bool:
            return not prompts_running(target) & {tuple(each.request.token_ids) for each in gone}

        await wait_until(cut_off, sizes.stall_s + 10)
        for reader, ids in zip(gone, expected[count - len(gone) :], strict=True):
            await check_cut_off(reader.read_all(), reader, ids)
            assert len(reader.ids) < sizes.num_tokens
        for task, reader, ids in zip(slowly, slow, expected[sizes.num_normal :], strict=False):
            # Whether they are slow or have stopped shows only when they have read half a window.
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert reader.ids == ids[: len(reader.ids)]
            else:
                await check_cut_off(task, reader, ids)
        await asyncio.gather(*(reader.__aexit__() for reader in slow))
        status = await quiet_status(target)
        assert_counts_balance(status)
    return share


@pytest.mark.timeout(90)
async def test_slow_and_stalled_readers_cost_the_others_nothing(tmp_path: Path) -> None:
    """Eight streams: two stop reading, one of them for a while only, and two are slow."""
    await check(make_tiny_model(tmp_path / "model", max_len=1024), SMALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_streams_of_4000_tokens(tmp_path: Path) -> None:
    """Five stop reading, five are slow, and the other ten keep at least 90 % of their speed."""
    share = await check(make_tiny_model(tmp_path / "model", max_len=8192), FULL)
    assert share >= 0.9
