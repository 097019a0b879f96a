"""Traces: what travels between services, what is on when, and that nothing is ever ambient."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from outrider.serving.settings import SettingsError
from outrider.serving.tracing import (
    Tracing,
    child_context,
    log_ids,
    remote_context,
    span_context,
    to_metadata,
    traceparent,
)
from tests.support.otlp import Spans, collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell that runs the tests has set is not what they are about."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_a_callers_trace_goes_on(name: str) -> None:
    """Ids and tracestate of the caller, whatever the case of the names, down to a third service."""
    spans = Spans()
    gateway, target = spans.tracing("gateway"), spans.tracing("target")
    context = remote_context([("user-agent", "x"), (name, GIVEN), ("TraceState", "vendor=1")])
    outer = gateway.tracer.start_span("chat m", context)
    inner = target.tracer.start_span("generate m", remote_context(to_metadata(outer)))
    inner.end()
    outer.end()
    below, above = spans.all
    assert (above.trace_id, above.parent_span_id) == (TRACE, PARENT)
    assert (below.trace_id, below.parent_span_id) == (TRACE, above.span_id)
    assert (below.service, above.service) == ("target", "gateway")
    assert dict(to_metadata(inner))["tracestate"] == "vendor=1"
    assert log_ids(outer) == {"trace_id": TRACE, "span_id": above.span_id}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("traceparent", "")],
        [("traceparent", "nonsense")],
        [("traceparent", GIVEN[:-1])],
        [("traceparent", GIVEN.upper())],
        [("traceparent", f"ff-{TRACE}-{PARENT}-01")],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", GIVEN + "x" * 1000)],
        [("traceparent", b"\xff\x00")],
        [("traceparent", GIVEN), ("traceparent", GIVEN)],
        [("tracestate", "vendor=1")],
    ],
)
def test_no_trace_or_nonsense_begins_a_new_one(
    metadata: list[tuple[str, str | bytes]] | None,
) -> None:
    """The context is empty: not an error, and not another request's trace."""
    spans = Spans()
    context = remote_context(metadata)
    assert context == Context()
    spans.tracing("gateway").tracer.start_span("chat m", context).end()
    (span,) = spans.all
    assert span.parent_span_id == ""
    assert span.trace_id not in ("0" * 32, TRACE)


@pytest.mark.parametrize("state", ["", "=", "a" * 2000, "vendor=ünïcode", ",,,", "a=b;c=d" * 50])
def test_a_tracestate_that_is_none_costs_only_itself(state: str) -> None:
    """The trace goes on without it."""
    context = remote_context([("traceparent", GIVEN), ("tracestate", state)])
    assert get_current_span(context).get_span_context().trace_id == int(TRACE, 16)


def test_what_the_caller_does_not_sample_nobody_records() -> None:
    """No spans here, and the next service is told the same."""
    spans = Spans()
    tracing = spans.tracing("gateway")
    parent = remote_context([("traceparent", f"00-{TRACE}-{PARENT}-00")])
    span = tracing.tracer.start_span("chat m", parent)
    child = tracing.tracer.start_span("queue", child_context(span))
    assert to_metadata(span)[0][1].startswith(f"00-{TRACE}-")
    assert to_metadata(span)[0][1].endswith("-00")
    child.end()
    span.end()
    assert spans.all == []


def test_without_tracing_the_context_still_travels() -> None:
    """A service that records nothing does not cut its neighbours' trace in two."""
    tracing = Tracing.disabled()
    assert not tracing.enabled
    span = tracing.tracer.start_span("chat m", remote_context([("traceparent", GIVEN)]))
    assert not span.is_recording()
    assert to_metadata(span) == (("traceparent", GIVEN),)
    none = tracing.tracer.start_span("chat m", remote_context(()))
    assert (to_metadata(none), traceparent(none), log_ids(none)) == ((), "", {})
    tracing.shutdown(1)


def test_one_string_for_the_draft_protocol() -> None:
    """What one side makes of a span the other side reads; anything else is None."""
    span = Spans().tracing("target").tracer.start_span("generate m", Context())
    found = span_context(traceparent(span))
    assert found is not None
    assert (found.trace_id, found.span_id) == (
        span.get_span_context().trace_id,
        span.get_span_context().span_id,
    )
    assert found.is_remote
    for nonsense in ("", "x", GIVEN + "\n\n", "00-" + "0" * 32):
        assert span_context(nonsense) is None
    span.end()


def test_no_span_is_ever_current() -> None:
    """Neither after a start nor after an end is there anything to detach."""
    tracing = Spans().tracing("gateway")
    span = tracing.tracer.start_span("chat m", Context())
    tracing.tracer.start_span("queue", child_context(span)).end()
    assert not get_current_span().get_span_context().is_valid
    span.end()
    assert not get_current_span().get_span_context().is_valid


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
RATIO = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}


@pytest.mark.parametrize(
    ("variables", "enabled"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}, True),
        (ENDPOINT | {"OTEL_TRACES_SAMPLER": "", "OTEL_BSP_SCHEDULE_DELAY": ""}, True),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, True),
    ],
)
def test_the_standard_variables_decide(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], enabled: bool
) -> None:
    """On with an endpoint or by name, off by default and by the switches."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing.from_environment("target", step_spans=True)
    assert (tracing.enabled, tracing.step_spans) == (enabled, enabled)
    tracing.shutdown(1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "otlp, console or none, got 'jaeger'"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "must be grpc, got 'http"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "https:// and name a host, got 'coll"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "QUEUE_SIZE must be a whole number above"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "QUEUE_SIZE must be a whole number above"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "QUEUE_SIZE must be a whole number above 0"),
        (ENDPOINT | {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2049"}, "at most the 2048 spans of OTEL"),
        (ENDPOINT | {"OTEL_BSP_SCHEDULE_DELAY": "abc"}, "OTEL_BSP_SCHEDULE_DELAY must be a whole"),
        (ENDPOINT | {"OTEL_BSP_SCHEDULE_DELAY": "9" * 5000}, "OTEL_BSP_SCHEDULE_DELAY must be"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, "COMPRESSION must be gzip or none"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "abc"}, "TIMEOUT must be a number of s"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "nan"}, "TIMEOUT must be a number of seconds"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nope"}, "CERTIFICATE: cannot read '/nope"),
        (ENDPOINT | {"OTEL_TRACES_SAMPLER": "bogus"}, "SAMPLER must be one of .*, got 'bogus'"),
        (ENDPOINT | RATIO | {"OTEL_TRACES_SAMPLER_ARG": "abc"}, "a number from 0 to 1, got 'abc'"),
        (ENDPOINT | RATIO | {"OTEL_TRACES_SAMPLER_ARG": "1.5"}, "a number from 0 to 1, got '1.5'"),
        (ENDPOINT | {"OTEL_SPAN_EVENT_COUNT_LIMIT": "x"}, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"}, "and name a host, got 'http://'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:x"}, "and name a host, got 'http://h:x'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"}, "and name a host, got 'http://.::1'"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    """At the start, and not by traces that are never seen."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=words):
        Tracing.from_environment("target")


SENDS_ONE = """
from opentelemetry.context import Context
from outrider.serving.tracing import Tracing
tracing = Tracing.from_environment("target", "number seven")
root = tracing.tracer.start_span("generate tiny", Context(), attributes={"outrider.k": 3})
root.add_event("round", {"outrider.accepted": 2})
root.end()
tracing.shutdown(5)
print(format(root.get_span_context().span_id, "016x"))
"""


async def _run(code: str, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), env=environment, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().strip()


async def test_a_process_delivers_its_spans_to_a_real_collector() -> None:
    """What the variables ask for: everything that has ended is there after the shutdown."""
    async with collector() as spans:
        span_id = await _run(SENDS_ONE, spans.environment)
        await spans.wait(lambda: spans.of("target"))
    (span,) = spans.all
    assert (span.name, span.span_id) == ("generate tiny", span_id)
    assert span.attributes == {"outrider.k": 3}
    assert span.events == [("round", {"outrider.accepted": 2})]
    assert (span.kind, span.status, span.parent_span_id) == ("internal", "unset", "")


async def test_names_of_a_service_by_the_variables() -> None:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over our own; the sampler is theirs."""
    environment = {"OTEL_TRACES_EXPORTER": "console"}
    ours = json.loads((await _run(SENDS_ONE, environment)).splitlines()[0])["resource"]
    assert ours["attributes"]["service.name"] == "outrider-target"
    assert ours["attributes"]["service.instance.id"] == "number seven"
    environment["OTEL_SERVICE_NAME"] = "large"
    environment["OTEL_RESOURCE_ATTRIBUTES"] = "service.instance.id=mine,deployment.environment=lab"
    theirs = json.loads((await _run(SENDS_ONE, environment)).splitlines()[0])["resource"]
    assert theirs["attributes"]["service.name"] == "large"
    assert theirs["attributes"]["service.instance.id"] == "mine"
    assert theirs["attributes"]["deployment.environment"] == "lab"
    environment["OTEL_TRACES_SAMPLER"] = "always_off"
    assert len((await _run(SENDS_ONE, environment)).splitlines()) == 1  # the id alone
