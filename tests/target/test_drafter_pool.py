"""Several drafters: found behind names, used as they come, left as they go."""

from __future__ import annotations

import asyncio

import pytest

from outrider.serving import discovery
from protos.outrider.v1 import draft_pb2
from tests.support.draft_scripts import Going
from tests.support.hub_world import OUTPUT, honest, hub_to
from tests.support.scripted_drafter import ScriptedDrafter

FULL = draft_pb2.SequenceGone.REASON_FULL


async def test_replicas_behind_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one gets the next sequence within a moment; one that left the name and died is gone."""
    monkeypatch.setattr(discovery, "REFRESH_S", 0.02)
    first, second = ScriptedDrafter(honest()), ScriptedDrafter(honest())
    async with first, second:
        behind = {first.address}

        async def look_up(address: str) -> set[str]:
            assert address == "draft:50053"
            return set(behind)

        async with hub_to("draft:50053", resolve=look_up) as world:
            await world.until(lambda: [c.ready for c in world.hub.clients] == [True])
            world.open()
            await world.drafts()
            behind.add(second.address)
            await world.until(lambda: [c.ready for c in world.hub.clients] == [True, True])
            world.hub.open(world.make_sequence())
            assert [c.num_sequences for c in world.hub.clients] == [1, 1]
            behind.remove(first.address)
            await asyncio.sleep(0.1)
            assert len(world.hub.clients) == 2  # it left the name but works still
            await first.stop()
            await world.until(lambda: [c.num_sequences for c in world.hub.clients] == [2])
            assert world.hub.clients[0].address == second.address


async def test_a_name_that_is_lost_for_a_moment_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name itself is not met as one more drafter while the name server is away."""
    monkeypatch.setattr(discovery, "REFRESH_S", 0.001)
    async with ScriptedDrafter(honest()) as drafter:
        behind = {drafter.address}
        num_vain = 0

        async def look_up(address: str) -> set[str]:
            nonlocal num_vain
            num_vain += not behind
            return set(behind) or {address}

        async with hub_to("draft:50053", resolve=look_up) as world:
            await world.until(lambda: [c.ready for c in world.hub.clients] == [True])
            (client,) = world.hub.clients
            behind.clear()
            await world.until(lambda: num_vain > 3)
            assert world.hub.clients == [client]


async def test_a_full_drafter_sends_a_sequence_to_the_next() -> None:
    """It is asked once; the other one gets the whole prefix under a new epoch."""
    full, free = ScriptedDrafter(Going(honest(), 1, FULL)), ScriptedDrafter(honest())
    async with full, free, hub_to(full.address, free.address) as world:
        await world.until(lambda: all(client.ready for client in world.hub.clients))
        world.open()
        assert await world.drafts() == OUTPUT[:4]
        assert [client.num_sequences for client in world.hub.clients] == [0, 1]
        assert [update.epoch for update in free.record.of(1)] == [2, 2][: len(free.record.of(1))]


async def test_when_all_are_full_a_sequence_goes_on_alone() -> None:
    """Each is asked once, and nobody waits for them."""
    one, two = (ScriptedDrafter(Going(honest(), 1, FULL)) for _ in range(2))
    async with one, two, hub_to(one.address, two.address) as world:
        await world.until(lambda: all(client.ready for client in world.hub.clients))
        world.open()
        await world.until(lambda: bool(one.record.of(1)) and bool(two.record.of(1)))
        await world.until(lambda: world.hub.granted(world.sequence) == 0)
        world.confirm(2)
        await asyncio.sleep(0.05)
        assert len(one.record.of(1)) == 1
        assert len(two.record.of(1)) == 1
        world.hub.close(world.sequence)
