"""Spans on their way out: a collector that is slow or deaf costs memory and time within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.serving.span_export import MAX_EVENTS, SpanExport
from outrider.serving.trace_variables import MAX_SPANS


class Collector(SpanExporter):
    """Takes spans as the test says."""

    def __init__(self) -> None:
        self.open = threading.Event()
        """Nothing is taken before."""
        self.closed = threading.Event()
        self.result = SpanExportResult.SUCCESS
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        while not self.open.wait(0.01):
            if self.closed.is_set():
                return SpanExportResult.FAILURE
        self.taken += len(spans)
        return self.result

    def shutdown(self) -> None:
        self.closed.set()


class Way:
    """A tracer whose spans go through a SpanExport to a Collector."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.export = SpanExport(self.collector)
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(self.export)
        self._tracer = self._provider.get_tracer("test")

    def send(self, count: int, num_events: int = 0) -> None:
        """That many spans, each with so many events of the usual size."""
        for _ in range(count):
            span = self._tracer.start_span("generate m", Context())
            for index in range(num_events):
                span.add_event("round", {f"outrider.key_{n}": index for n in range(7)})
            span.end()


@pytest.fixture
def way() -> Iterator[Way]:
    """One that ends with the test."""
    made = Way()
    yield made
    made.export.close(0)


def test_all_spans_arrive_and_none_is_counted_as_lost(way: Way) -> None:
    """Also those that ended just before the end."""
    way.collector.open.set()
    way.send(1000, num_events=2)
    way.export.close(10)
    assert way.collector.taken == 1000
    assert way.export.dropped == 0


def test_a_deaf_collector_costs_bounded_memory_and_no_time(way: Way) -> None:
    """What does not fit is counted: every span is either taken in or lost."""
    began_s = time.monotonic()
    way.send(3 * MAX_SPANS)
    assert time.monotonic() - began_s < 5
    assert way.export.dropped == 2 * MAX_SPANS
    way.collector.open.set()
    way.export.close(10)
    assert way.collector.taken == MAX_SPANS
    assert way.export.dropped == 2 * MAX_SPANS


def test_spans_with_many_events_are_fewer(way: Way) -> None:
    """The bound is one of memory: 128 events weigh more than the span that has them."""
    way.send(150, num_events=128)
    assert way.export.dropped == 150 - MAX_EVENTS // 128
    way.collector.open.set()
    way.export.close(10)
    assert way.collector.taken == MAX_EVENTS // 128


def test_what_a_collector_refuses_is_counted(way: Way) -> None:
    """A failed export is a loss, and makes room for others."""
    way.collector.result = SpanExportResult.FAILURE
    way.collector.open.set()
    way.send(10)
    assert way.export.force_flush()
    assert way.export.dropped == 10
    way.collector.result = SpanExportResult.SUCCESS
    way.send(MAX_SPANS)
    way.export.close(10)
    assert way.export.dropped == 10


def test_the_end_does_not_wait_for_a_deaf_collector(
    way: Way, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is given its time and no more, and the log says what was lost."""
    way.send(700)
    began_s = time.monotonic()
    way.export.close(0.3)
    assert 0.3 <= time.monotonic() - began_s < 2
    assert way.collector.closed.is_set()
    assert way.export.dropped == 700
    assert "spans were lost" in capsys.readouterr().out
