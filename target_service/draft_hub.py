"""All drafters, and which sequence uses which: each sticks to one and moves when that is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from protos.outrider.v1 import draft_pb2
from target_service.draft_client import DraftClient
from target_service.draft_link import DraftedSequence


class DraftHub:
    """Assigns sequences to drafters. Every method is immediate."""

    def __init__(
        self, addresses: Sequence[str], hello: draft_pb2.Hello, on_arrival: Callable[[], None]
    ) -> None:
        self._homes: dict[tuple[DraftClient, int], DraftedSequence] = {}
        self._homeless: dict[DraftedSequence, None] = {}
        self._on_arrival = on_arrival
        self.clients = [self._make_client(address, hello) for address in addresses]

    def start(self) -> None:
        """Begin to connect to every drafter."""
        for client in self.clients:
            client.start()

    async def stop(self) -> None:
        """Hang up everywhere."""
        await asyncio.gather(*(client.stop() for client in self.clients))

    @property
    def frames(self) -> Counter[str]:
        """Frames of all drafters, by what became of them."""
        return sum((client.frames for client in self.clients), Counter())

    def open(self, sequence: DraftedSequence) -> None:
        """Find a drafter for the sequence, now or as soon as there is one."""
        ready = [client for client in self.clients if client.ready]
        if not ready:
            self._homeless[sequence] = None
            return
        client = min(ready, key=lambda each: (not each.responsive, each.num_sequences))
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

    def _make_client(self, address: str, hello: draft_pb2.Hello) -> DraftClient:
        client = DraftClient(
            address,
            hello,
            on_arrival=self._on_arrival,
            on_ready=self._house_the_homeless,
            on_lost=lambda ids: self._move(client, ids),
        )
        return client

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
