"""One sequence from its opening to its end, however it ends: its counts, its log line, its span.

A sequence that is sent again under a new epoch goes on; one that was gone and comes back is
another. Only what belongs to a trace of its target's has a span.
"""

from __future__ import annotations

import time
from enum import Enum

import structlog
from opentelemetry.trace import INVALID_SPAN, Link, NonRecordingSpan, Span, Status, StatusCode

from draft_service.sessions import Opening
from outrider.serving.faults import Faults
from outrider.serving.tracing import Tracing, child_context, log_ids, span_context

log = structlog.get_logger(__name__)


class End(Enum):
    """Every sequence ends in one of these; GoneReason has the same names for what it is about."""

    FINISHED = "finished"
    EVICTED = "evicted"
    UNKNOWN = "unknown"
    FULL = "full"
    TOO_LONG = "too_long"
    FAILED = "failed"
    """Steps fail with it."""
    LOST = "lost"
    """Its stream ended before it did."""


_ERRORS = {End.FAILED: "steps fail with it", End.LOST: "the stream ended before the sequence"}


class SequenceRecords:
    """Makes the records of all sequences, and counts over all of them."""

    def __init__(
        self,
        proposer: str = "",
        tracing: Tracing | None = None,
        faults: Faults | None = None,
    ) -> None:
        """proposer: how it guesses. tracing: None for none."""
        self.proposer = proposer
        self.tracing = tracing or Tracing.disabled()
        self.faults = faults or Faults()
        self.started = 0
        self.ended = dict.fromkeys(End, 0)
        self.proposed_tokens = 0

    def begin(self, sequence_id: int, opening: Opening) -> SequenceRecord:
        """A sequence is opened."""
        return SequenceRecord(self, sequence_id, opening)


class SequenceRecord:
    """Told of everything as it happens."""

    def __init__(self, shared: SequenceRecords, sequence_id: int, opening: Opening) -> None:
        self.confirmed_len = 0
        """Tokens that the target has confirmed, the prompt's among them."""
        self._shared = shared
        self._sequence_id = sequence_id
        self._prompt_len = opening.prompt_len
        self._started_s = time.monotonic()
        self._num_proposed = 0
        self._num_resyncs = 0
        self._span: Span = INVALID_SPAN
        shared.started += 1
        with shared.faults:
            self._span = self._start_span(opening.traceparent)

    def resynced(self) -> None:
        """Its tokens come once more, under a new epoch."""
        self._num_resyncs += 1
        self.confirmed_len = 0

    def proposed(self, num_tokens: int) -> None:
        """So many are on their way to the target."""
        self._num_proposed += num_tokens
        self._shared.proposed_tokens += num_tokens

    def end(self, end: End) -> None:
        """It is over. Called once."""
        self._shared.ended[end] += 1
        facts = {
            "sequence_id": self._sequence_id,
            "prompt_len": self._prompt_len,
            "confirmed_len": self.confirmed_len,
            "proposed_tokens": self._num_proposed,
            "resyncs": self._num_resyncs,
        }
        with self._shared.faults:
            log.info(
                "sequence",
                outcome=end.value,
                **facts,
                duration_s=round(time.monotonic() - self._started_s, 4),
                **log_ids(self._span),
            )
        with self._shared.faults:
            self._end_span(end, facts)

    def _start_span(self, traceparent: str) -> Span:
        parent = span_context(traceparent) if traceparent else None
        if parent is None:
            return INVALID_SPAN
        return self._shared.tracing.tracer.start_span(
            f"draft {self._shared.proposer}",
            context=child_context(NonRecordingSpan(parent)),
            links=[Link(parent)],
        )

    def _end_span(self, end: End, facts: dict[str, int]) -> None:
        self._span.set_attributes({f"outrider.{name}": value for name, value in facts.items()})
        self._span.set_attribute("outrider.outcome", end.value)
        if end in _ERRORS:
            self._span.set_attribute("error.type", end.value)
            self._span.set_status(Status(StatusCode.ERROR, _ERRORS[end]))
        self._span.end()
