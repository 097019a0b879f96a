"""Several drafters: found behind names, used as they come, left as they go."""

from __future__ import annotations

import asyncio

import pytest

from outrider.serving import discovery
from outrider.serving.discovery import needs_refresh, resolve
from protos.outrider.v1 import draft_pb2
from target_service import draft_hub
from tests.support.draft_scripts import Going
from tests.support.hub_world import OUTPUT, honest, hub_to
from tests.support.scripted_drafter import ScriptedDrafter

FULL = draft_pb2.SequenceGone.REASON_FULL


async def test_an_address_stands_for_itself() -> None:
    """Addresses are not looked up, of either family."""
    for address in ("127.0.0.1:50053", "[::1]:50053"):
        assert await resolve(address) == {address}
        assert not needs_refresh([address])


async def test_a_name_stands_for_its_addresses() -> None:
    """Known ones are looked up, unknown ones are left to be tried later."""
    assert await resolve("localhost:50053") in ({"127.0.0.1:50053"}, {"[::1]:50053"})
    assert await resolve("no-such-name.invalid:1") == {"no-such-name.invalid:1"}
    assert needs_refresh(["127.0.0.1:1", "localhost:2"])
    assert await discovery.resolve_all(["127.0.0.1:1", "[::1]:2"]) == {"127.0.0.1:1", "[::1]:2"}


async def test_replicas_behind_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one gets the next sequence within a moment; one that left the name and died is gone."""
    monkeypatch.setattr(draft_hub, "REFRESH_S", 0.02)
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
