"""Where the spans of a test go, and a way to look at them.

In the test's own process, for services that are made with a `tracing`:

    spans = Spans()
    GatewayService(settings, tracing=spans.tracing("gateway"))

From other processes, through a real collector (`rotel`) that passes on to the test:

    async with collector() as spans:
        spawn("gateway", folder, environment=spans.environment)
        await spans.wait(lambda: spans.of("gateway"))

Both give the same `Seen`, read from OTLP's own messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from outrider.cli.demo import free_ports
from outrider.serving.tracing import Tracing

_KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
}
_STATUSES = {
    trace_pb2.Status.STATUS_CODE_UNSET: "unset",
    trace_pb2.Status.STATUS_CODE_OK: "ok",
    trace_pb2.Status.STATUS_CODE_ERROR: "error",
}


@dataclass(frozen=True)
class Seen:
    """A span as a collector gets it. Ids are hexadecimal, as in a traceparent."""

    service: str
    """gateway, target or draft."""
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    """Empty for a root."""
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    """(trace_id, span_id) of each."""
    status: str
    """unset, ok or error."""
    status_message: str

    @property
    def duration_s(self) -> float:
        """From its start to its end."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Spans:
    """All spans that have arrived, in the order in which they did."""

    all: list[Seen] = field(default_factory=list)
    num_started: int = 0
    """Counted for the tracings made here only: a collector sees no span that has not ended."""
    environment: dict[str, str] = field(default_factory=dict)
    """What makes a service process send its spans here."""

    def tracing(self, service: str, *, step_spans: bool = False) -> Tracing:
        """For a service in this process: its spans are here as soon as they have ended."""
        return Tracing.with_processor(service, _Recorder(self), step_spans=step_spans)

    def of(self, service: str, name: str = "") -> list[Seen]:
        """A service's spans whose names begin like this."""
        return [s for s in self.all if s.service == service and s.name.startswith(name)]

    def trace(self, trace_id: str) -> list[Seen]:
        """All spans of one trace."""
        return [span for span in self.all if span.trace_id == trace_id]

    def children(self, parent: Seen) -> list[Seen]:
        """The spans right under another, of whatever service."""
        return [
            span for span in self.trace(parent.trace_id) if span.parent_span_id == parent.span_id
        ]

    async def wait(self, condition: Callable[[], object], timeout_s: float = 10) -> None:
        """Until the condition holds. AssertionError with all that has arrived if it never does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            seen = [f"{span.service}: {span.name}" for span in self.all]
            raise AssertionError(f"the spans never came; there are {seen}") from None

    def add(self, groups: Iterable[trace_pb2.ResourceSpans]) -> None:
        """What an export request holds."""
        for group in groups:
            service = _attributes(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.all.extend(_seen(service.removeprefix("outrider-"), s) for s in scope.spans)


def _seen(service: str, span: trace_pb2.Span) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        kind=_KINDS[span.kind],
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        status=_STATUSES[span.status.code],
        status_message=span.status.message,
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


class _Recorder(SpanProcessor):
    """Puts every span that ends into a Spans, by way of OTLP's messages."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._spans.num_started += 1

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.add(encode_spans([span]).resource_spans)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """The receiving end of OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans = Spans()
        self.delay_s = 0.0
        """How long every answer takes."""
        self.num_exports = 0

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take the spans in."""
        self.num_exports += 1
        await asyncio.sleep(self.delay_s)
        self.spans.add(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def environment_for(port: int) -> dict[str, str]:
    """What makes a service process send its spans to that port of this machine, at once."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


@contextlib.asynccontextmanager
async def receiver(port: int = 0) -> AsyncIterator[Receiver]:
    """A receiver in the test's own event loop, on a free port if none is given."""
    server, made = grpc.aio.server(), Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    made.spans.environment = environment_for(port)
    await server.start()
    try:
        yield made
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Spans]:
    """A real collector process between the services and the test."""
    async with receiver() as behind:
        grpc_port, http_port = free_ports(2)
        onward = behind.spans.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
        with tempfile.TemporaryFile() as log, _rotel(grpc_port, http_port, onward, log) as process:
            behind.spans.environment = environment_for(grpc_port)
            await _listens(grpc_port, process)
            yield behind.spans


@contextlib.contextmanager
def _rotel(
    grpc_port: int, http_port: int, onward: str, log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    import rotel

    command = [
        *(str(Path(rotel.__file__).with_name("rotel-agent")), "start"),
        f"--otlp-grpc-endpoint=127.0.0.1:{grpc_port}",
        f"--otlp-http-endpoint=127.0.0.1:{http_port}",
        *("--exporter=otlp", f"--otlp-exporter-endpoint={onward}"),
        *("--otlp-exporter-protocol=grpc", "--batch-timeout=50ms"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(5)


async def _listens(port: int, process: subprocess.Popen[bytes], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            assert process.poll() is None, f"the collector ended with {process.returncode}"
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(0.02)
