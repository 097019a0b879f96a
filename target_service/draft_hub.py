"""All drafters, and which sequence uses which: each sticks to one and moves when that is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from outrider.serving.discovery import Names, Resolve, resolve
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import draft_pb2
from target_service.draft_client import DraftClient
from target_service.draft_link import DraftedSequence
from target_service.draft_tail import DraftTotals, Unused
from target_service.observer import Observer


class DraftHub:
    """Assigns sequences to drafters. Every method is immediate."""

    def __init__(
        self,
        addresses: Sequence[str],
        hello: draft_pb2.Hello,
        on_arrival: Callable[[], None],
        *,
        resolve: Resolve = resolve,
        totals: DraftTotals | None = None,
        observer: Observer | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """tls: None for plain text to the drafters."""
        self._names = Names(addresses, resolve)
        self._hello = hello
        self._on_arrival = on_arrival
        self._totals = DraftTotals() if totals is None else totals
        self._observer = observer or Observer()
        self._tls = tls
        self._homes: dict[tuple[DraftClient, int], DraftedSequence] = {}
        self._homeless: dict[DraftedSequence, None] = {}
        self._num_opened = 0
        self._last_opened: dict[DraftClient, int] = {}
        self._discovery: asyncio.Task[None] | None = None
        self._old_frames: Counter[str] = Counter()  # of drafters that are gone
        self._old_attempts = 0
        self.clients: list[DraftClient] = []
        if not self._names.may_change:
            self.clients = [self._make_client(address) for address in addresses]

    def start(self) -> None:
        """Begin to connect to every drafter, and to look for new ones behind names."""
        for client in self.clients:
            client.start()
        if self._names.may_change:
            following = self._names.follow(self._discovered)
            self._discovery = asyncio.create_task(following, name="drafter discovery")

    async def stop(self) -> None:
        """Hang up everywhere."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait({self._discovery})
        await asyncio.gather(*(client.stop() for client in self.clients))

    @property
    def frames(self) -> Counter[str]:
        """Frames of all drafters, by what became of them."""
        return sum((client.frames for client in self.clients), self._old_frames.copy())

    @property
    def connect_attempts(self) -> int:
        """Attempts to connect to any drafter."""
        return self._old_attempts + sum(client.connect_attempts for client in self.clients)

    def open(self, sequence: DraftedSequence) -> None:
        """Find a drafter for the sequence, now or as soon as there is one."""
        ready = [client for client in self.clients if client.ready]
        willing = [client for client in ready if client.address not in sequence.refused_by]
        if not willing:
            self._homeless[sequence] = None
            return
        client = min(willing, key=self._preference)
        self._num_opened += 1
        self._last_opened[client] = self._num_opened
        sequence.client = client
        sequence.sequence_id = client.open(sequence.confirmed, sequence.tail, sequence.facts)
        self._homes[client, sequence.sequence_id] = sequence
        client.mark(sequence.sequence_id, sequence.window)

    def update(self, sequence: DraftedSequence, window: int) -> None:
        """Confirmed tokens have grown, or the window has changed."""
        sequence.window = window
        if sequence.client is not None:
            sequence.client.mark(sequence.sequence_id, window)

    def close(self, sequence: DraftedSequence) -> None:
        """The sequence has ended."""
        self._homeless.pop(sequence, None)
        if sequence.client is not None:
            self._homes.pop((sequence.client, sequence.sequence_id), None)
            sequence.client.close(sequence.sequence_id)
            sequence.client = None

    def granted(self, sequence: DraftedSequence) -> int:
        """Drafts of this sequence that a step may hope for."""
        client = sequence.client
        return 0 if client is None else client.granted(sequence.sequence_id)

    def note_vain_wait(self, sequence: DraftedSequence) -> None:
        """A step waited for drafts of this sequence to the end of its patience."""
        if sequence.client is not None:
            sequence.client.note_vain_wait()

    def _preference(self, client: DraftClient) -> tuple[bool, int, int]:
        """Among equals whoever waits the longest, or under light load one would get it all."""
        return (not client.may_be_asked, client.num_sequences, self._last_opened.get(client, 0))

    async def _discovered(self, addresses: set[str]) -> None:
        """What the names stand for now. A drafter that left is kept while it is connected."""
        known = {client.address for client in self.clients}
        for address in sorted(addresses - known):
            client = self._make_client(address)
            self.clients.append(client)
            client.start()
        for client in [each for each in self.clients if each.address not in addresses]:
            if not client.ready:
                self.clients.remove(client)
                self._last_opened.pop(client, None)
                self._old_frames += client.frames
                self._old_attempts += client.connect_attempts
                await client.stop()

    def _make_client(self, address: str) -> DraftClient:
        client = DraftClient(
            address,
            self._hello,
            on_arrival=self._on_arrival,
            on_ready=self._house_the_homeless,
            on_lost=lambda ids: self._move(client, ids),
            on_refused=lambda sequence_id: self._try_another(client, sequence_id),
            totals=self._totals,
            observer=self._observer,
            tls=self._tls,
            server_name=self._names.host_of(address),
        )
        return client

    def _try_another(self, client: DraftClient, sequence_id: int) -> None:
        """A drafter has no room for a sequence: perhaps another one has."""
        sequence = self._homes[client, sequence_id]
        sequence.refused_by.add(client.address)
        others = [each for each in self.clients if each.ready]
        if all(each.address in sequence.refused_by for each in others):
            return
        del self._homes[client, sequence_id]
        client.close(sequence_id)
        sequence.client = None
        sequence.tail.restart(Unused.LOST)
        self.open(sequence)

    def _house_the_homeless(self) -> None:
        homeless, self._homeless = self._homeless, {}
        for sequence in homeless:
            self.open(sequence)

    def _move(self, client: DraftClient, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            sequence = self._homes.pop((client, sequence_id))
            sequence.client = None
            self.open(sequence)
        self._on_arrival()  # steps that wait for this drafter look again
