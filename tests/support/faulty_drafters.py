"""Drafters that a test can take away and give back, one class for each way to fail.

async with FAULTS["killed"](known, model, folder) as drafter:
    ...                      # point a target at drafter.address
    await drafter.strike()   # the fault begins
    await drafter.mend()     # everything is well again, at the same address
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc

from tests.support.draft_scripts import Behaviour, Closing, Drafting, Perfect
from tests.support.processes import killed_at_end, spawn
from tests.support.relay import Relay
from tests.support.scripted_drafter import ScriptedDrafter, spawn_scripted_drafter

Known = dict[tuple[int, ...], list[int]]


class Drafter(Protocol):
    """A drafter that a test can take away and give back."""

    address: str

    async def strike(self) -> None:
        """The fault begins."""

    async def mend(self) -> None:
        """Everything is well again, at the same address."""


class ScriptedProcess:
    """Dies with its connections closed by the kernel (SIGKILL)."""

    def __init__(self, known: Known) -> None:
        self._spec = {"script": "perfect", "known": [[list(p), o] for p, o in known.items()]}

    async def __aenter__(self) -> ScriptedProcess:
        self._process = await spawn_scripted_drafter(self._spec)
        self.address = self._process.address
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._process.kill()

    async def strike(self) -> None:
        await self._process.kill()

    async def mend(self) -> None:
        port = int(self.address.rpartition(":")[2])
        self._process = await spawn_scripted_drafter(self._spec | {"port": port})


class StoppedProcess(ScriptedProcess):
    """Keeps its connections and answers nothing (SIGSTOP)."""

    async def strike(self) -> None:
        self._process.pause()

    async def mend(self) -> None:
        self._process.resume()


class RealDraftService:
    """The draft service itself with the target's own weights, killed with SIGKILL.

    A relay keeps the address, and a second process stands by, so that loading a model takes none of
    the time that the target has to come back to it.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RealDraftService:
        self._first, self._second = [
            self._stack.enter_context(
                killed_at_end(spawn("draft", self._folder, proposer="model", model=self._model))
            )
            for _ in range(2)
        ]
        await self._first.wait_listening()
        await self._second.wait_listening()
        self._relay = await self._stack.enter_async_context(Relay(self._first.address))
        self.address = self._relay.address
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def strike(self) -> None:
        self._first.kill()

    async def mend(self) -> None:
        self._relay.upstream = self._second.address


class Network:
    """A drafter that is well, behind a network that is not."""

    def __init__(self, known: Known) -> None:
        self._drafter = ScriptedDrafter(Drafting(Perfect(known)))
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Network:
        await self._stack.enter_async_context(self._drafter)
        self._relay = await self._stack.enter_async_context(Relay(self._drafter.address))
        self.address = self._relay.address
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()


class StalledNetwork(Network):
    """Packets are lost for a while and sent again by TCP: bytes wait, connections stay."""

    async def strike(self) -> None:
        self._relay.stall()

    async def mend(self) -> None:
        self._relay.resume()


class HalfOpen(Network):
    """The drafter's host is gone without a word; the new one knows nothing of old connections."""

    async def strike(self) -> None:
        self._relay.drop()

    async def mend(self) -> None:
        self._relay.reset()
        self._relay.resume()


class HalfOpenUnnoticed(Network):
    """The same, and nobody tells the target that its old connection is dead."""

    async def strike(self) -> None:
        self._relay.drop()

    async def mend(self) -> None:
        self._relay.resume()


class ClosedStream:
    """Ends the stream with a status and refuses new ones."""

    def __init__(self, known: Known, code: grpc.StatusCode) -> None:
        self._good: Behaviour = Drafting(Perfect(known))
        self._code = code
        self._drafter = ScriptedDrafter(self._good)

    async def __aenter__(self) -> ClosedStream:
        await self._drafter.start()
        self.address = self._drafter.address
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._drafter.stop()

    async def strike(self) -> None:
        self._drafter.refuse = (grpc.StatusCode.UNAVAILABLE, "refused by the script")
        self._drafter.behaviour = Closing(self._good, 1, self._code)
        await self._drafter.record.wait_for(lambda record: record.streams_open == 0)

    async def mend(self) -> None:
        self._drafter.refuse = None
        self._drafter.behaviour = self._good


Make = Callable[[Known, Path, Path], contextlib.AbstractAsyncContextManager[Drafter]]

FAULTS: dict[str, Make] = {
    "killed": lambda known, *_: ScriptedProcess(known),
    "real_service_killed": lambda _, model, folder: RealDraftService(model, folder),
    "stopped": lambda known, *_: StoppedProcess(known),
    "packets_lost": lambda known, *_: StalledNetwork(known),
    "half_open": lambda known, *_: HalfOpen(known),
    "closed_UNAVAILABLE": lambda known, *_: ClosedStream(known, grpc.StatusCode.UNAVAILABLE),
    "closed_INTERNAL": lambda known, *_: ClosedStream(known, grpc.StatusCode.INTERNAL),
    "closed_RESOURCE_EXHAUSTED": lambda known, *_: ClosedStream(
        known, grpc.StatusCode.RESOURCE_EXHAUSTED
    ),
    "closed_OK": lambda known, *_: ClosedStream(known, grpc.StatusCode.OK),
}


LONG_FAULTS: dict[str, Make] = FAULTS | {
    # Only keepalive finds this out, which takes up to 15 s.
    "half_open_unnoticed": lambda known, *_: HalfOpenUnnoticed(known),
}
