"""A target and a drafter that clients leave, and the right state when all have left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from draft_service.service import DraftService
from outrider.serving.channel import open_channel
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.in_process import HOST, Target, running_target
from tests.support.relay import Relay
from tests.support.token_streams import assert_counts_balance, quiet_status, wait_until

MAX_SEQUENCES = 10


@dataclass(frozen=True)
class Server:
    """A target, its drafter and a network between clients and the target."""

    target: Target
    drafter: draft_pb2_grpc.DraftStub
    relay: Relay

    async def draft_sessions(self) -> int:
        """Sequences open at the drafter."""
        status = await self.drafter.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=5)
        return status.load.sessions

    async def wait_waiting(self, count: int, timeout_s: float) -> None:
        """Return when so many wait in the target's line."""

        async def waiting() -> bool:
            return (await self.target.status()).load.waiting == count

        await wait_until(waiting, timeout_s)


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[Server]:
    """Both real services in this process, the drafter connected."""
    async with contextlib.AsyncExitStack() as stack:
        draft = DraftService(DraftSettings(port=0))
        listen = await stack.enter_async_context(listening(draft, HOST, 0))
        address = f"{HOST}:{listen.port}"
        target = await stack.enter_async_context(
            running_target(
                model, address, kv_tokens=32768, step_tokens=64, max_sequences=MAX_SEQUENCES
            )
        )
        relay = await stack.enter_async_context(Relay(target.address))
        channel = await stack.enter_async_context(open_channel(address))

        async def connected() -> bool:
            return (await target.status()).drafters[0].state == "ready"

        await wait_until(connected, 5)
        yield Server(target, draft_pb2_grpc.DraftStub(channel), relay)


async def check_all_is_free(server: Server) -> None:
    """The right state after everybody has left; the last exit was just now."""
    status = await quiet_status(server.target, timeout_s=2.0)

    async def no_sessions() -> bool:
        return await server.draft_sessions() == 0

    await wait_until(no_sessions, 2.0)
    assert status.pool.free == status.pool.total
    assert_counts_balance(status)
    await asyncio.sleep(0.2)
    later = await server.target.status()
    assert later.load.generated_tokens == status.load.generated_tokens
    # The step that was on the device when they left still ends.
    assert later.load.steps <= status.load.steps + 1
    assert later.load.failed == 0
    assert later.drafters[0].sequences == 0


async def best_latency_s(ask: Callable[[], Awaitable[object]]) -> float:
    """Time of a short request when nothing else runs: the best of many, as other programs disturb
    the rest; let it go without drafts, whose number depends on costs that the target has learned.
    """
    times = []
    for _ in range(40):
        started = time.monotonic()
        await ask()
        times.append(time.monotonic() - started)
        await asyncio.sleep(0.02)
    return min(times)
