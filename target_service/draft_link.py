"""What one drafter has been told of one sequence, and the update that it should get next.

Pure bookkeeping for `draft_client`: updates are not queued but computed from what was sent, at the
moment of writing, so that a slow drafter gets one large update and never a backlog.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.params import SamplingParams, VerificationMode
from target_service.draft_tail import DraftTail, Unused

if TYPE_CHECKING:
    from target_service.draft_client import DraftClient

MAX_UPDATE_TOKENS = 8192
"""Most tokens of one update; a longer prefix continues in the next frame."""
_TRACKED_UPDATES = 64


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """What a drafter is told when a sequence opens."""

    prompt_len: int
    max_len: int
    sampling: SamplingParams
    partition: bytes
    verification: VerificationMode
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    traceparent: str = ""
    """The trace that the request belongs to; empty if it has none."""


@dataclass(eq=False, slots=True)
class DraftedSequence:
    """A sequence that wants drafts, wherever they come from."""

    confirmed: list[int]
    """Shared with the engine's sequence."""
    tail: DraftTail
    facts: SequenceFacts
    window: int = 0
    client: DraftClient | None = None
    sequence_id: int = 0
    """Its name on the client's stream."""
    refused_by: set[str] = field(default_factory=set)
    """Drafters, by address, that have no room for it."""


@dataclass(frozen=True, slots=True)
class Update:
    """One SequenceUpdate, before it is protobuf."""

    sequence_id: int
    epoch: int
    update_seq: int
    base_len: int
    tokens: list[int]
    window: int
    finished: bool
    facts: SequenceFacts | None


class SequenceLink:
    """One sequence on one stream. `sequence_id` is never used twice there."""

    def __init__(
        self, sequence_id: int, confirmed: list[int], tail: DraftTail, facts: SequenceFacts
    ) -> None:
        self.sequence_id = sequence_id
        self.tail = tail
        self.facts = facts
        self.window = 0
        self.finished = False
        self.refused = False
        """The drafter will not draft for this sequence (full, or too long)."""
        self.num_resyncs = 0
        """Since a proposal was last of use."""
        self.held_back = False
        """The next prefix waits a little, because the last ones were in vain."""
        self._confirmed = confirmed
        self._sent_epoch = 0
        self._sent_len = 0
        self._sent_window = 0
        self._update_seq = 0
        self._sent_at: OrderedDict[int, float] = OrderedDict()

    @property
    def needs_update(self) -> bool:
        """There is something that the drafter does not know yet."""
        if self.refused:
            return False
        if self.finished:
            return self._sent_epoch > 0
        if self.held_back:
            return False
        return (
            self._sent_epoch != self.tail.epoch
            or self._sent_len < len(self._confirmed)
            or self._sent_window != self.window
        )

    @property
    def opening(self) -> bool:
        """The next update starts an epoch, and so carries the settings."""
        return not self.finished and self._sent_epoch != self.tail.epoch

    def next_update(self, now_s: float, max_tokens: int = MAX_UPDATE_TOKENS) -> Update:
        """The update that brings the drafter as far as one frame can; call it only to write it."""
        opening = self.opening
        if opening:
            self._sent_epoch, self._sent_len = self.tail.epoch, 0
        base = self._sent_len
        tokens = [] if self.finished else self._confirmed[base : base + max_tokens]
        self._sent_len += len(tokens)
        complete = self._sent_len == len(self._confirmed)
        # Drafting starts once the whole prefix is there.
        self._sent_window = self.window if complete and not self.finished else 0
        self._update_seq += 1
        self._sent_at[self._update_seq] = now_s
        while len(self._sent_at) > _TRACKED_UPDATES:
            self._sent_at.popitem(last=False)
        return Update(
            sequence_id=self.sequence_id,
            epoch=self._sent_epoch,
            update_seq=self._update_seq,
            base_len=base,
            tokens=tokens,
            window=self._sent_window,
            finished=self.finished,
            facts=self.facts if opening else None,
        )

    def take_sent_at(self, update_seq: int) -> float | None:
        """When that update was written, asked for the first time; None afterwards."""
        return self._sent_at.pop(update_seq, None)

    def resync(self, reason: Unused) -> None:
        """Send the whole prefix again under a new epoch."""
        self.tail.restart(reason)
