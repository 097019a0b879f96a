"""B42 through HTTP: headers that are no trace's, and requests that share a connection.

What may be sent as a header is wilder than what gRPC lets through, and the requests of one
connection run one after the other in tasks that are made of each other. Right: whatever is not one
well-formed context is as if it were not there, and no request inherits from the one before it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_b42_mixed_traces import new_traceparent
from tests.support.doors import chat_body, http_client, http_port
from tests.support.gateways import Gateway, gateway_with
from tests.support.http_gateway import CHAT, HOST
from tests.support.otlp import Spans
from tests.support.scripted_target import Script

TRACE, PARENT = "ab" * 16, "cd" * 8
GOOD = f"00-{TRACE}-{PARENT}-01"
REFUSED = {
    "empty": [b""],
    "nonsense": [b"00-nonsense"],
    "no trace": [f"00-{'0' * 32}-{PARENT}-01".encode()],
    "no parent": [f"00-{TRACE}-{'0' * 16}-01".encode()],
    "upper case": [GOOD.upper().encode()],
    "no version": [b"ff" + GOOD[2:].encode()],
    "more of version 00": [GOOD.encode() + b"-more"],
    "too short": [GOOD[:-1].encode()],
    "twice": [GOOD.encode(), GOOD.encode()],
    "two in one": [GOOD.encode() + b", " + GOOD.encode()],
    "no text": [b"00-\xff\xfe-" + PARENT.encode() + b"-01"],
    "long": [b"00-" + b"a" * 8000],
}


async def ask(gateway: Gateway, lines: list[bytes]) -> None:
    """One chat with these lines in its head."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
    about = [b"Host: x", b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    head = [b"POST %b HTTP/1.1" % CHAT.encode(), *about, *lines]
    async with http_client(http_port(gateway)) as client:
        answer = await client.raw_answer(b"\r\n".join(head) + b"\r\n\r\n" + body)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED)
async def test_what_is_no_context_begins_a_new_trace(
    tiny_folder: Path, values: list[bytes]
) -> None:
    """The request is served all the same; of the state that belongs to no context nothing stays."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0}
    async with gateway_with(tiny_folder, Script([5]), **settings) as (gateway, target):
        lines = [b"traceparent: " + value for value in values]
        await ask(gateway, [*lines, b"tracestate: a=b"])
        await spans.wait(lambda: spans.all, 2)
    (span,) = spans.all
    assert span.parent_span_id == "" and span.trace_id != TRACE
    told = target.seen.metadata[0]
    assert told["traceparent"].startswith(f"00-{span.trace_id}-{span.span_id}-")
    assert "tracestate" not in told


@pytest.mark.parametrize(
    "lines",
    [
        [f"TRACEPARENT: {GOOD}", "TraceState: a=b"],
        [f"traceparent:{GOOD}", "tracestate: a=b"],
        [f"Traceparent: \t {GOOD} \t ", "tracestate: a=b"],
        [f"traceparent: 01-{TRACE}-{PARENT}-01-more", "tracestate: a=b"],
    ],
)
async def test_what_is_one_is_kept(tiny_folder: Path, lines: list[str]) -> None:
    """In any case, with any space around it, of a version that is still to come."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0}
    async with gateway_with(tiny_folder, Script([5]), **settings) as (gateway, target):
        await ask(gateway, [line.encode() for line in lines])
        await spans.wait(lambda: spans.all, 2)
    (span,) = spans.all
    assert (span.trace_id, span.parent_span_id) == (TRACE, PARENT)
    assert target.seen.metadata[0]["tracestate"] == "a=b"


async def test_requests_of_one_connection(tiny_folder: Path) -> None:
    """One by one and all at once: each has the trace that it names, or one of its own."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0}
    callers = [new_traceparent() if number % 3 else None for number in range(12)]
    callers[5] = new_traceparent("00")  # not sampled
    async with (
        gateway_with(tiny_folder, Script([5, 6]), **settings) as (gateway, target),
        http_client(http_port(gateway)) as client,
    ):
        for number, caller in enumerate(callers):
            headers = {"traceparent": caller[0]} if caller else {}
            headers["X-Request-Id"] = f"r{number}"
            answer = await client.ask("POST", CHAT, chat_body("x", 2), headers)
            assert answer.status == 200
        for number, caller in enumerate(callers):
            await client.write(pipelined(f"p{number}", caller[0] if caller else ""))
        await spans.wait(lambda: len(spans.all) == 2 * len(callers) - 2)
    seen = {span.attributes["outrider.request_id"]: span for span in spans.all}
    told = [metadata.get("traceparent", "") for metadata in target.seen.metadata]
    for kind, row in (("r", told[:12]), ("p", told[12:])):
        for number, caller in enumerate(callers):
            span = seen.get(f"{kind}{number}")
            if number == 5:
                assert span is None
                assert row[number].startswith(f"00-{caller[1]}-") and row[number].endswith("-00")
                continue
            assert row[number].startswith(f"00-{span.trace_id}-{span.span_id}-")
            given = (caller[1], caller[2]) if caller else (span.trace_id, "")
            assert (span.trace_id, span.parent_span_id) == given
    assert len({span.trace_id for span in spans.all if not span.parent_span_id}) == 8


def pipelined(request_id: str, traceparent: str) -> bytes:
    """A whole request, which does not wait for the answer of the one before."""
    body = b'{"model": "tiny", "prompt": "x"}'
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
        *([f"traceparent: {traceparent}"] if traceparent else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
