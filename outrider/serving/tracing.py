"""Traces: one explicit tracer a service, and how a trace's context travels between them.

Nothing here is global and no span is ever "current": a span is started with the context of its
parent and handed on as a value. So a stream that ends early has nothing to detach, and no task
inherits another request's trace.

Unless the standard OTEL_ variables name an exporter or an endpoint, tracing is off and costs
nothing; a caller's context then still travels on to the next service.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanContext,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.serving.settings import SettingsError
from outrider.serving.span_export import SpanExport, exporters_from_environment
from outrider.serving.trace_variables import sampler
from outrider.serving.version import VERSION

_W3C = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")

Metadata = Iterable[tuple[str, str | bytes]]


class Tracing:
    """A service's tracer, and what to do with it at the end of the process."""

    tracer: Tracer
    """Every `start_span` is given a context: `remote_context(...)` or `child_context(parent)`."""
    enabled: bool
    """Off: the tracer makes no spans."""
    step_spans: bool
    """Whether the engine's steps get spans of their own."""

    def __init__(
        self,
        provider: TracerProvider | None = None,
        exports: Iterable[SpanExport] = (),
        *,
        step_spans: bool = False,
    ) -> None:
        """For the class methods. provider: None for no tracing."""
        self._provider = provider
        self._exports = list(exports)
        self.enabled = provider is not None
        self.step_spans = self.enabled and step_spans
        self.tracer = provider.get_tracer("outrider", VERSION) if provider else NoOpTracer()

    @classmethod
    def disabled(cls) -> Tracing:
        """No spans."""
        return cls()

    @classmethod
    def from_environment(
        cls, service: str, instance_id: str = "", *, step_spans: bool = False
    ) -> Tracing:
        """As the standard OTEL_ variables say. Raises SettingsError for a value that is none."""
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls.disabled()
        try:
            exports = [SpanExport(each) for each in exporters_from_environment()]
            if not exports:
                return cls.disabled()
            provider = _provider(service, instance_id, sampler(), exports)
        except (ValueError, RuntimeError) as error:
            raise SettingsError(f"the OTEL_ variables: {error}") from error
        return cls(provider, exports, step_spans=step_spans)

    @classmethod
    def with_processor(
        cls, service: str, processor: SpanProcessor, *, step_spans: bool = False
    ) -> Tracing:
        """Every span goes to `processor`, whatever the environment says."""
        provider = _provider(service, "", ParentBased(ALWAYS_ON), [processor])
        return cls(provider, step_spans=step_spans)

    @property
    def spans_dropped(self) -> int:
        """Spans that never reached a collector, so far."""
        return sum(export.dropped for export in self._exports)

    def shutdown(self, timeout_s: float) -> None:
        """Deliver what has ended; returns in time, delivered or not. Blocks."""
        for export in self._exports:
            export.close(timeout_s)
        if self._provider is not None:
            self._provider.shutdown()


def _provider(
    service: str, instance_id: str, sampled: Sampler, processors: Iterable[SpanProcessor]
) -> TracerProvider:
    ours = {
        "service.name": f"outrider-{service}",
        "service.version": VERSION,
        "service.instance.id": instance_id or uuid.uuid4().hex,
    }
    # What is given to `create` wins over the variables, so they are asked first.
    given = OTELResourceDetector().detect().attributes
    provider = TracerProvider(
        sampler=sampled, resource=Resource.create(ours | dict(given)), shutdown_on_exit=False
    )
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def remote_context(metadata: Metadata | None) -> Context:
    """The caller's trace from a call's metadata; an empty context if it says none, or nonsense."""
    headers: dict[str, list[str]] = {}
    for key, value in metadata or ():
        if key.lower() in _HEADERS and isinstance(value, str):
            headers.setdefault(key.lower(), []).append(value)
    if len(headers.get("traceparent", ())) != 1:
        return Context()
    return _extract(headers)


def child_context(parent: Span) -> Context:
    """What a child of `parent` is started with, and nothing of what is around."""
    return set_span_in_context(parent, Context())


def to_metadata(span: Span) -> tuple[tuple[str, str], ...]:
    """The span's context for the metadata of a call; nothing for a span that has none."""
    if not span.get_span_context().is_valid:
        return ()
    headers: dict[str, str] = {}
    _W3C.inject(headers, child_context(span))
    return tuple(headers.items())


def traceparent(span: Span) -> str:
    """The span's context as one string; empty for a span that has none."""
    return dict(to_metadata(span)).get("traceparent", "")


def span_context(traceparent: str) -> SpanContext | None:
    """What `traceparent` made; None for anything else."""
    found = get_current_span(_extract({"traceparent": [traceparent]})).get_span_context()
    return found if found.is_valid else None


def log_ids(span: Span) -> dict[str, str]:
    """What a log line says of its span: trace_id and span_id, or nothing."""
    context = span.get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _extract(headers: Mapping[str, list[str]]) -> Context:
    return _W3C.extract(dict(headers), Context())
