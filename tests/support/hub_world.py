"""A hub of drafters with one sequence, as tests of the target's side of the protocol need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from target_service.draft_client import DraftClient
from target_service.draft_hub import DraftHub
from target_service.draft_link import DraftedSequence
from target_service.draft_tail import DraftTail, DraftTotals
from tests.support.draft_scripts import Behaviour, Drafting, Perfect
from tests.support.draft_stream import make_hello
from tests.support.target_parts import MAX_WINDOW, VOCAB_SIZE, make_facts

PROMPT = [1, 2, 3]
OUTPUT = list(range(10, 60))
HASH = bytes(range(32))
WAIT_S = 8.0


def honest() -> Behaviour:
    """Proposes what the target would say."""
    return Drafting(Perfect({tuple(PROMPT): OUTPUT}))


class Watched:
    """A client or a hub of clients, and what they have called back."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.lost: list[list[int]] = []

    async def until(self, enough: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Return once `enough()`; TimeoutError after a while."""
        async with asyncio.timeout(timeout_s):
            while not enough():  # of several things, some without an event
                await asyncio.sleep(0.005)


class HubWorld(Watched):
    """One sequence that confirms what it is drafted, over a hub."""

    def __init__(self, *addresses: str, **hub: Any) -> None:
        super().__init__()
        self.totals = DraftTotals()
        self.hub = DraftHub(addresses, make_hello(), self.changed.set, totals=self.totals, **hub)
        self.num_drafted = 0
        self.sequence = self.make_sequence()

    def make_sequence(self) -> DraftedSequence:
        """A sequence that has its prompt."""
        confirmed = list(PROMPT)
        tail = DraftTail(confirmed, VOCAB_SIZE, MAX_WINDOW, self.totals)
        return DraftedSequence(confirmed, tail, make_facts(len(PROMPT)))

    def open(self, window: int = 4) -> None:
        """Ask for drafts."""
        self.hub.open(self.sequence)
        self.hub.update(self.sequence, window)

    def confirm(self, count: int, window: int = 4) -> None:
        """The target has chosen `count` more tokens."""
        start = len(self.sequence.confirmed) - len(PROMPT)
        self.sequence.confirmed.extend(OUTPUT[start : start + count])
        drafted = min(count, len(self.sequence.tail.tokens))
        self.num_drafted += drafted
        self.sequence.tail.advance(drafted, count)
        self.hub.update(self.sequence, window)

    async def drafts(self, count: int = 4) -> list[int]:
        """The tail, once it holds `count` tokens."""
        await self.until(lambda: len(self.sequence.tail.tokens) >= count)
        return list(self.sequence.tail.tokens)

    async def ready(self) -> DraftClient:
        """The first drafter, connected."""
        client = self.hub.clients[0]
        await self.until(lambda: client.ready)
        return client


@contextlib.asynccontextmanager
async def hub_to(*addresses: str, **hub: Any) -> AsyncIterator[HubWorld]:
    """A hub that connects to these drafters."""
    world = HubWorld(*addresses, **hub)
    world.hub.start()
    try:
        yield world
    finally:
        await world.hub.stop()
