"""Spans on their way to a collector, which may be slow, deaf, or not there.

Whatever it does, a request only ever appends to a queue, the queue is bounded, what does not fit is
counted, and the end of the process waits no longer than it is told to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)

from outrider.serving.trace_variables import batch_arguments, endpoint, exporter_arguments, variable

log = structlog.get_logger(__name__)
# Through the standard library, where `logs.py` lets all that is said of a collector pass once a
# minute.
rare = logging.getLogger(__name__)

MAX_EVENTS = 16384
"""Events of all waiting spans together. A long answer's span has 128, which are 170 kB here, and
23 kB on the wire, where collectors take 4 MB at once."""
_ABORT_S = 0.5
"""What an exporter that was told to stop gets to notice it."""


def exporters_from_environment() -> Iterator[SpanExporter]:
    """What OTEL_TRACES_EXPORTER and the endpoint variables ask for. ValueError for what is not
    here."""
    wanted = variable("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint() else "none")
    for name in wanted.split(","):
        if name.strip() == "otlp":
            yield _otlp()
        elif name.strip() == "console":
            yield ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")
        elif name.strip() != "none":
            raise ValueError(f"OTEL_TRACES_EXPORTER must be otlp, console or none, got {name!r}")


def _otlp() -> OTLPSpanExporter:
    protocol = variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "grpc"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got {protocol!r}")
    return OTLPSpanExporter(**exporter_arguments())


class SpanExport(SpanProcessor):
    """Takes ended spans, and gives them to an exporter in batches on a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Raises ValueError for an OTEL_BSP_ variable outside its limits."""
        sizes = batch_arguments()
        self._max_spans = sizes["max_queue_size"]
        self._counting = _CountingExporter(exporter)
        self._batches = BatchSpanProcessor(self._counting, **sizes)

    @property
    def dropped(self) -> int:
        """Spans that did not fit, or that the collector did not take."""
        return self._counting.lost

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue it, or count it as dropped."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if not self._counting.expect(span, self._max_spans):
            rare.warning("the collector does not keep up: spans are dropped")
            return
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Nothing more than `close` has done."""

    def close(self, timeout_s: float) -> None:
        """Deliver what waits, for at most about `timeout_s`; then give up what is left."""
        ending = threading.Thread(target=self._batches.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            self._counting.give_up()
            ending.join(_ABORT_S)
        if self.dropped or self._counting.waiting:
            log.warning("spans were lost", spans=self.dropped + self._counting.waiting)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Deliver what waits now. Blocks for as long as the exporter does."""
        return self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Knows how much waits for the exporter inside, and what that lost to deliver."""

    def __init__(self, inner: SpanExporter) -> None:
        self.lost = 0
        self.waiting = 0
        self._waiting_events = 0
        self._inner = inner
        self._given_up = False
        self._lock = threading.Lock()

    def expect(self, span: ReadableSpan, max_spans: int) -> bool:
        """Whether there is room for the span; if so it counts as waiting."""
        with self._lock:
            if self.waiting >= max_spans or self._waiting_events >= MAX_EVENTS:
                self.lost += 1
                return False
            self.waiting += 1
            self._waiting_events += len(span.events)
            return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Blocks until they are delivered or lost."""
        result = SpanExportResult.FAILURE
        try:
            if not self._given_up:
                result = self._inner.export(spans)
            return result
        finally:
            with self._lock:
                self.waiting -= len(spans)
                self._waiting_events -= sum(len(span.events) for span in spans)
                if result is not SpanExportResult.SUCCESS:
                    self.lost += len(spans)

    def give_up(self) -> None:
        """End the export that is going on, and fail all others."""
        self._given_up = True
        self._inner.shutdown()

    def shutdown(self) -> None:
        """The batches are done."""
        if not self._given_up:
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return True
