"""Names of services become addresses, for as long as the process lives."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from outrider.serving import discovery
from outrider.serving.discovery import Names, resolve


async def test_an_address_stands_for_itself() -> None:
    """Addresses are not looked up, of either family."""
    for address in ("127.0.0.1:50053", "[::1]:50053"):
        assert await resolve(address) == {address}
        assert not Names([address]).may_change


async def test_a_name_stands_for_its_addresses() -> None:
    """Known ones are looked up, the others are left to be tried later."""
    assert await resolve("localhost:50053") in ({"127.0.0.1:50053"}, {"[::1]:50053"})
    assert await resolve("no-such-name.invalid:1") == {"no-such-name.invalid:1"}
    assert Names(["127.0.0.1:1", "localhost:2"]).may_change
    assert await Names(["127.0.0.1:1", "[::1]:2"]).look_up() == {"127.0.0.1:1", "[::1]:2"}


@pytest.mark.parametrize("host", ["draft..svc", "x" * 64, f"a.{'x' * 64}.svc"])
async def test_what_cannot_be_a_name_is_like_one_that_is_not_known(host: str) -> None:
    """Empty and long labels are refused before anything is asked, with an error of their own."""
    assert await resolve(f"{host}:1") == {f"{host}:1"}


async def test_a_name_that_is_lost_for_a_moment_stands_for_what_it_did() -> None:
    """Nobody is cut off because a name server is away; a name that is known again counts anew."""
    behind = {"a:1": {"10.0.0.1:1"}, "b:2": {"b:2"}}

    async def look_up(address: str) -> set[str]:
        return behind[address]

    names = Names(["a:1", "b:2"], look_up)
    assert await names.look_up() == {"10.0.0.1:1", "b:2"}
    behind |= {"a:1": {"a:1"}, "b:2": {"10.0.0.2:2", "10.0.0.3:2"}}
    assert await names.look_up() == {"10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2"}
    behind |= {"a:1": {"10.0.0.4:1"}, "b:2": {"b:2"}}
    assert await names.look_up() == {"10.0.0.4:1", "10.0.0.2:2", "10.0.0.3:2"}


async def test_following_goes_on_behind_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the look-up fails or what is done with its result, the next one is in time."""
    monkeypatch.setattr(discovery, "REFRESH_S", 0.001)
    calls, done = [], asyncio.Event()

    async def look_up(address: str) -> set[str]:
        calls.append("look up")
        if len(calls) == 1:
            raise RuntimeError("no name server")
        return {address}

    async def take(addresses: set[str]) -> None:
        calls.append("take")
        if calls.count("take") == 1:
            raise RuntimeError("no memory")
        done.set()

    with capture_logs() as entries:
        following = asyncio.create_task(Names(["a:1"], look_up).follow(take))
        await done.wait()
        following.cancel()
        await asyncio.wait({following})
    assert calls == ["look up", *["look up", "take"] * 2]
    assert [str(entry["exc_info"]) for entry in entries] == ["no name server", "no memory"]
    assert {entry["log_level"] for entry in entries} == {"error"}


async def test_an_address_has_the_host_that_it_was_found_by() -> None:
    """A certificate is for the name that is configured; for an address it is the address."""

    async def resolve(address: str) -> set[str]:
        return {"10.0.0.1:1", "[fd00::1]:1"} if address == "draft.svc:1" else {address}

    names = Names(["draft.svc:1", "10.0.0.9:1", "[::1]:1"], resolve)
    await names.look_up()
    for address, host in [
        ("10.0.0.1:1", "draft.svc"),
        ("[fd00::1]:1", "draft.svc"),
        ("10.0.0.9:1", "10.0.0.9"),
        ("[::1]:1", "::1"),
        ("10.0.0.7:1", "10.0.0.7"),
    ]:
        assert names.host_of(address) == host
