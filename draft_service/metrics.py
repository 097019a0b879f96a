"""The draft service's metrics: everything that it counts anyway, read at the moment of a scrape.

A scrape runs on the event loop, so sequences started are those that ended and those that are open.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from draft_service.batch import DraftLoop
from draft_service.book import Capacity
from draft_service.record import SequenceRecords
from draft_service.servicer import DraftServicer
from outrider.serving.energy import EnergyMeter
from outrider.serving.faults import Faults
from outrider.serving.metrics import (
    SECONDS_BUCKETS,
    TOKENS_BUCKETS,
    Snapshot,
    counter,
    counters,
    gauge,
)

_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, *SECONDS_BUCKETS)


class DraftMetrics:
    """Reads the parts of a drafter, as soon as there are any."""

    def __init__(self, registry: CollectorRegistry, device: str = "cpu") -> None:
        self.faults = Faults()
        # Beside a GPU the processors' part would pass for the whole.
        self._energy = EnergyMeter() if device == "cpu" else None
        self._parts: tuple[DraftServicer, DraftLoop, Capacity, SequenceRecords] | None = None
        self._step = Histogram(
            "outrider_drafter_step_seconds",
            "One step of the proposer.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._batch = Histogram(
            "outrider_drafter_batch_sequences",
            "Sequences that wanted tokens from a step.",
            buckets=TOKENS_BUCKETS,
            registry=registry,
        )
        registry.register(Snapshot(self._families))

    def attach(
        self,
        servicer: DraftServicer,
        loop: DraftLoop,
        capacity: Capacity,
        records: SequenceRecords,
    ) -> None:
        """The drafter is there."""
        self._parts = servicer, loop, capacity, records

    def stepped(self, num_sequences: int, seconds: float) -> None:
        """A step is over."""
        with self.faults:
            self._step.observe(seconds)
            self._batch.observe(num_sequences)

    def _families(self) -> Iterator[Metric]:
        yield counter("telemetry_errors", "Errors of logs, traces and metrics.", self.faults.count)
        joules = self._energy.joules() if self._energy else None
        if joules is not None:
            yield counter("energy_joules", "Energy that this machine's processors took.", joules)
        if self._parts is not None:
            servicer, loop, capacity, records = self._parts
            yield from _sequences(capacity, records)
            yield gauge("draft_queue", "Sequences that want tokens now.", loop.queue_len)
            yield gauge("draft_streams", "Targets that are connected.", servicer.num_streams)
            yield counter("busy_seconds", "Seconds that the proposer worked.", loop.compute_s)


def _sequences(capacity: Capacity, records: SequenceRecords) -> Iterator[Metric]:
    yield gauge("draft_sessions", "Open sequences.", capacity.num_sequences)
    yield gauge("draft_session_capacity", "Sequences that it can hold.", capacity.max_sequences)
    yield counter("drafter_sequences_started", "Sequences that were opened.", records.started)
    yield counters(
        "drafter_sequences",
        "Sequences that ended, by how.",
        "outcome",
        {end.value: count for end, count in records.ended.items()},
    )
    yield counter(
        "drafter_proposed_tokens", "Tokens sent to targets as drafts.", records.proposed_tokens
    )
