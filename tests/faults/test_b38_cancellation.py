"""B38: a cancellation does not reach the far end, or leaks.

Symptom: the server works on for a client that has gone, a client waits for ever for the end of its
call, memory grows with every cancel. Right: the client sees CANCELLED or DEADLINE_EXCEEDED; within
a round the target has stopped and within a second the drafter has forgotten the sequence; after
thousands of them there are as many tasks as before and the process is no larger; nothing is left
behind that asyncio complains of. Reported in public of gRPC itself: handlers stuck in a yield, a
cancellation that turns into silence, native memory that grows with cancelled or long streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from draft_service.service import DraftService
from outrider.serving.channel import open_channel
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.draft_scripts import Mute
from tests.support.draft_stream import make_hello, make_open
from tests.support.in_process import HOST, Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import wait_for_drafters
from tests.support.token_streams import (
    AUTO,
    assert_counts_balance,
    fixed,
    greedy,
    quiet_status,
    slow_steps,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)

MAX_GROWTH_BYTES = 20 * 2**20
AT_ONCE = 50
SESSION_CLOSED_S = 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough that nothing ends by itself."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=8192)


@dataclass(frozen=True)
class Server:
    """A target with the real drafter."""

    target: Target
    drafter: draft_pb2_grpc.DraftStub

    async def no_sessions(self) -> bool:
        """The drafter has forgotten everybody."""
        status = await self.drafter.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=5)
        return status.load.sessions == 0


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[Server]:
    """Both services in this process, so that their tasks and their memory can be counted."""
    async with (
        listening(DraftService(DraftSettings(port=0)), HOST, 0) as draft,
        running_target(
            model,
            f"{HOST}:{draft.port}",
            kv_tokens=65536,
            max_sequences=AT_ONCE,
            prefix_cache=False,
        ) as target,
        open_channel(f"{HOST}:{draft.port}") as channel,
    ):
        await wait_for_drafters(target)
        yield Server(target, draft_pb2_grpc.DraftStub(channel))


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No "never retrieved", "never awaited" or "was destroyed" while the block runs."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("asyncio")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught, capture_logs():
            warnings.simplefilter("always")
            yield
            gc.collect()
    finally:
        logger.removeHandler(listener)
    said += [str(each.message) for each in caught]
    assert [each for each in said if "never" in each or "destroyed" in each] == []


Call = grpc.aio.UnaryStreamCall[target_pb2.TokenRequest, target_pb2.TokenChunk]
Leave = Callable[[Target, int], Awaitable[None]]


async def expect(call: Call, code: grpc.StatusCode) -> None:
    """The client is told, and with this code."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
    assert await asyncio.wait_for(call.code(), 5) is code


def start(target: Target, number: int, timeout_s: float = 60) -> Call:
    """A long request with drafts."""
    prompt = [5 + number % 300, 6 + number % 7, 7]
    return target.stub.Generate(greedy(prompt, 8000, AUTO), timeout=timeout_s)


async def cancel_before_the_first_message(target: Target, number: int) -> None:
    """At once, or before the prompt is read."""
    call = start(target, number)
    await asyncio.sleep(0.001 * (number % 4))
    call.cancel()
    await expect(call, grpc.StatusCode.CANCELLED)


async def cancel_between_rounds(target: Target, number: int) -> None:
    """After a few chunks."""
    call = start(target, number)
    for _ in range(1 + number % 5):
        await call.read()
    call.cancel()
    await expect(call, grpc.StatusCode.CANCELLED)


async def let_the_deadline_pass(target: Target, number: int) -> None:
    """The client's own deadline, in mid-stream."""
    call = start(target, number, timeout_s=0.15 + 0.01 * (number % 5))
    await expect(call, grpc.StatusCode.DEADLINE_EXCEEDED)


async def close_the_channel(target: Target, number: int) -> None:
    """The whole connection, in mid-stream."""
    async with open_channel(target.address) as channel:
        prompt = [5 + number % 300, 9, 7]
        stub = target_pb2_grpc.TargetStub(channel)
        call = stub.Generate(greedy(prompt, 8000, AUTO), timeout=60)
        await call.read()
    await expect(call, grpc.StatusCode.CANCELLED)


WAYS: list[Leave] = [
    cancel_before_the_first_message,
    cancel_between_rounds,
    let_the_deadline_pass,
    close_the_channel,
]


async def leave_in_waves(target: Target, count: int) -> None:
    """`count` requests, 50 at once, in all ways side by side."""
    for first in range(0, count, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, count))
        await asyncio.gather(*(WAYS[n % len(WAYS)](target, n) for n in numbers))


async def check_all_is_free(server: Server) -> None:
    """Now, not at some time."""
    status = await quiet_status(server.target, 2)
    await wait_until(server.no_sessions, SESSION_CLOSED_S)
    assert_counts_balance(status)
    assert status.load.failed == 0


def rss_bytes() -> int:
    """Memory of this process, garbage aside."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def settled_tasks(at_most: int) -> int:
    """The number of tasks, once it is down to `at_most` or has had a second."""
    deadline_s = time.monotonic() + 1
    while len(asyncio.all_tasks()) > at_most and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    return len(asyncio.all_tasks())


async def check_cancels(model: Path, warm: int, more: int) -> None:
    """`warm` of them, then `more`, between which neither tasks nor memory may have grown."""
    async with serving(model) as server:
        tasks = len(asyncio.all_tasks())
        with nothing_left_behind():
            await leave_in_waves(server.target, warm)
            await check_all_is_free(server)
            before = rss_bytes()
            await leave_in_waves(server.target, more)
            await check_all_is_free(server)
        assert await settled_tasks(tasks) <= tasks
        assert rss_bytes() - before < MAX_GROWTH_BYTES
        assert len(await server.target.ids(greedy([5, 6], 20))) == 20


async def test_cancels_of_every_kind_leave_nothing_behind(model: Path) -> None:
    """100, 50 at once."""
    await check_cancels(model, 50, 50)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_thousand_cancels_leave_nothing_behind(model: Path) -> None:
    """500, and then 1,500 over which the process must not grow by 20 MB."""
    await check_cancels(model, 500, 1500)


async def test_a_cancelled_request_ends_within_a_round(model: Path) -> None:
    """Steps of 0.2 s: the one that runs is the last one."""
    async with serving(model) as server:
        slow_steps(server.target, 0.2)
        call = start(server.target, 1)
        await call.read()
        steps = (await server.target.status()).load.steps
        call.cancel()
        await wait_until(server.no_sessions, SESSION_CLOSED_S)
        status = await quiet_status(server.target, 0.5)
        await asyncio.sleep(0.5)
        assert (await server.target.status()).load.steps <= steps + 2
        assert status.load.cancelled == 1


async def test_a_request_that_waits_for_drafts_can_be_cancelled(model: Path) -> None:
    """Its drafter never answers, the round waits for it, and the client leaves in the middle."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafter.address) as target,
    ):
        await wait_for_drafters(target)
        call = target.stub.Generate(greedy([5, 6], 100, fixed(4)), timeout=30)
        await call.read()
        await drafter.record.wait_for(lambda record: any(record.windows(1)))
        call.cancel()
        await expect(call, grpc.StatusCode.CANCELLED)
        await quiet_status(target, 1)
        await drafter.record.wait_for(lambda record: (0, 1) in record.finished, SESSION_CLOSED_S)


async def run_rounds(stub: draft_pb2_grpc.DraftStub, warm: int, more: int) -> int:
    """One stream, that many rounds of a token each; how far memory grew over the last `more`."""
    call = stub.Speculate()
    await call.write(draft_pb2.SpeculateRequest(hello=make_hello()))
    assert (await call.read()).HasField("hello")
    before = 0
    for round_number in range(warm + more):
        if round_number == warm:
            before = rss_bytes()
        sequence_id, position = divmod(round_number, 1000)
        update = draft_pb2.SequenceUpdate(
            sequence_id=sequence_id + 1,
            epoch=1,
            update_seq=position + 1,
            base_len=position,
            tokens=[5 + position % 3],
            window=4,
            finished=position == 999,
        )
        if position == 0:
            update.open.CopyFrom(make_open(prompt_len=1))
        await call.write(draft_pb2.SpeculateRequest(updates=[update]))
        if not update.finished:
            await call.read()
    after = rss_bytes()
    await call.done_writing()
    call.cancel()
    return after - before


@pytest.mark.parametrize(
    ("warm", "more"),
    [
        (500, 1500),
        pytest.param(10_000, 90_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
async def test_a_stream_that_stays_open_does_not_grow(warm: int, more: int) -> None:
    """Rounds without end on one stream of the draft service, its interceptors and all."""
    async with (
        listening(DraftService(DraftSettings(port=0)), HOST, 0) as draft,
        open_channel(f"{HOST}:{draft.port}") as channel,
    ):
        with nothing_left_behind():
            grown = await run_rounds(draft_pb2_grpc.DraftStub(channel), warm, more)
    assert grown < MAX_GROWTH_BYTES
