"""B37: no reconnect after a restart, or all reconnect at once.

Symptom: after a drafter has got another address, or was away for long, drafts stay off for minutes
or for good; replicas that were added are never used; or everybody who lost it knocks at the same
moment, again and again, and grows with each attempt. Right: drafts are used within ten seconds of
the drafter being there, wherever it is then; each of three replicas gets its part; while it is away
there are few attempts, with jitter, and none because of requests; memory stays flat. Reported in
public of gRPC and of services built on it: a channel stuck with an old address, a client that uses
one of several, a backoff that grows to two minutes, a storm of reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.draft_scripts import Empty
from tests.support.hub_world import HubWorld, hub_to
from tests.support.in_process import Target, running_target
from tests.support.processes import ServiceProcess, killed_at_end, running_process, spawn
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_streams import AUTO, fixed, greedy, wait_until

pytestmark = pytest.mark.timeout(60)

USED_WITHIN_S = 10.0
NAME = "localhost:1"
"""What the target is told; the test says what it stands for."""


class Names:
    """A name service of the test's own."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = set(addresses)

    async def resolve(self, name: str) -> set[str]:
        """The addresses of this moment."""
        assert name == NAME
        return set(self.addresses)


@contextlib.asynccontextmanager
async def target_of(names: Names, model: Path) -> AsyncIterator[Target]:
    """A target whose drafters are behind the name."""
    async with running_target(model, NAME) as target:
        target.service._hub._names._resolve = names.resolve
        yield target


@contextlib.asynccontextmanager
async def light_load(target: Target) -> AsyncIterator[Counter[str]]:
    """One short request after another while the block runs; which drafters they used."""
    used: Counter[str] = Counter()

    async def run() -> None:
        number = 0
        while True:
            number += 1
            reading = asyncio.create_task(
                target.ids(greedy([5 + number % 300, 6, 7, 5 + number % 300, 6], 12, AUTO))
            )
            seen: set[str] = set()
            while not reading.done():
                drafters = (await target.status()).drafters
                seen |= {each.address for each in drafters if each.sequences}
                await asyncio.sleep(0.001)
            assert len(await reading) == 12
            used.update(seen)

    task = asyncio.create_task(run())
    try:
        yield used
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def used_soon(used: Counter[str], address: str) -> None:
    """Requests go there, within ten seconds from now."""
    before = used[address]

    async def again() -> bool:
        return used[address] > before

    await wait_until(again, USED_WITHIN_S)


async def proposed_by(drafter: ServiceProcess) -> int:
    """What the drafter itself says of its work."""
    async with open_channel(drafter.address) as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        status = await stub.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=5)
        return status.proposed_tokens


async def test_a_drafter_moves_and_is_scaled_up_and_down(tiny_model: Path, tmp_path: Path) -> None:
    """Processes behind a name, under one request at a time: the only one goes and comes back at
    another address, then there are three and each gets at least 15 % of the requests, then one."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_process("draft", tmp_path))
        names = Names(first.address)
        target = await stack.enter_async_context(target_of(names, tiny_model))
        used = await stack.enter_async_context(light_load(target))
        await used_soon(used, first.address)

        first.terminate()
        assert await first.wait_exit() == 0
        replicas = [
            await stack.enter_async_context(running_process("draft", tmp_path)) for _ in range(3)
        ]
        names.addresses = {replicas[0].address}
        await used_soon(used, replicas[0].address)

        async def has_proposed() -> bool:
            return await proposed_by(replicas[0]) > 0

        await wait_until(has_proposed, USED_WITHIN_S)

        names.addresses = {each.address for each in replicas}
        await asyncio.gather(*(used_soon(used, each.address) for each in replicas))
        before = used.copy()
        await asyncio.sleep(2)
        share = used - before
        assert min(share[each.address] for each in replicas) >= 0.15 * share.total(), share

        names.addresses = {replicas[2].address}
        for each in replicas[:2]:
            each.kill()
        await used_soon(used, replicas[2].address)

        async def others_forgotten() -> bool:
            drafters = (await target.status()).drafters
            return [each.address for each in drafters] == [replicas[2].address]

        await wait_until(others_forgotten, USED_WITHIN_S)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def check_found(model: Path, folder: Path, away_s: float) -> None:
    """The target is there first; the drafter comes `away_s` later."""
    port = free_port()
    async with running_target(model, f"127.0.0.1:{port}") as target:
        assert len(await target.ids(greedy([5, 6], 10, fixed(4)))) == 10
        await asyncio.sleep(away_s)
        with killed_at_end(spawn("draft", folder, port=port)) as drafter:
            await drafter.wait_listening()
            came_s = time.monotonic()

            async def drafts() -> bool:
                # So many that the model, quick as it is, is not done before a draft can be there.
                request = greedy([5, 6, 7, 5, 6, 7, 5], 200, AUTO)
                return (await target.answer(request)).speculation.drafted > 0

            await wait_until(drafts, USED_WITHIN_S)
            assert time.monotonic() - came_s < USED_WITHIN_S


async def test_a_target_that_was_there_first_finds_its_drafter(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It has tried in vain before, and served without drafts."""
    await check_found(tiny_model, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_three_minutes_of_outage_make_no_long_wait(tiny_model: Path, tmp_path: Path) -> None:
    """However long it was away, it is used within ten seconds."""
    await check_found(tiny_model, tmp_path, 180)


class ClosedDoor:
    """Accepts connections and resets them, and remembers when."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def __aenter__(self) -> ClosedDoor:
        self._server = await asyncio.start_server(self._refuse, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.times.append(time.monotonic())
        writer.transport.abort()


async def check_attempts(seconds: float) -> None:
    """Five targets lose their drafter at the same moment, and have requests all the time."""
    async with contextlib.AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(ClosedDoor()) for _ in range(5)]
        # A door for each, so that it is known who knocks.
        hubs = [await stack.enter_async_context(hub_to(door.address)) for door in doors]
        started_s = time.monotonic()
        while time.monotonic() - started_s < seconds:
            for hub in hubs:
                open_and_close(hub)
            await asyncio.sleep(0.02)
        for door in doors:
            early = [each for each in door.times if each - started_s < 60]
            # A run shorter than a minute gets its part of 30, and what the start costs.
            assert 3 <= len(early) <= 5 + 25 * min(1.0, seconds / 60)
        rounds = list(zip(*(door.times for door in doors), strict=False))
        spread = [max(times) - min(times) for times in rounds[1:]]  # the first is the start
        assert sum(each > 0.1 for each in spread) >= 0.8 * len(spread), spread


def open_and_close(hub: HubWorld) -> None:
    """A request that wants drafts and ends again."""
    sequence = hub.make_sequence()
    hub.hub.open(sequence)
    hub.hub.update(sequence, 4)
    hub.hub.close(sequence)


async def test_attempts_are_few_and_not_all_at_once() -> None:
    """At most 30 a minute each, none because of a request, and not within 100 ms of each other."""
    await check_attempts(6)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_attempts_stay_few_over_minutes() -> None:
    """Two minutes of it."""
    await check_attempts(120)


@contextlib.contextmanager
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An outage of hours in seconds."""
    with monkeypatch.context() as patch:
        patch.setattr("target_service.draft_client._BACKOFF_S", (0.002, 0.002))
        yield


def rss_bytes() -> int:
    """Memory of this process, garbage aside."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("warm", "more"),
    [(50, 100), pytest.param(300, 3000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
async def test_memory_does_not_grow_with_attempts(
    warm: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many attempts as an outage of hours makes; then the drafter is found all the same."""
    with no_backoff(monkeypatch):
        async with (
            ScriptedDrafter(Empty()) as drafter,
            hub_to(drafter.address) as world,
        ):
            client = await world.ready()
            await drafter.stop()
            start = client.connect_attempts
            await world.until(lambda: client.connect_attempts > start + warm, 250)
            tasks, before = len(asyncio.all_tasks()), rss_bytes()
            await world.until(lambda: client.connect_attempts > start + warm + more, 250)
            assert rss_bytes() - before < 20 * 2**20
            assert len(asyncio.all_tasks()) <= tasks + 5
            await drafter.start()
            await world.until(lambda: client.ready, 10)
