"""B41: contexts that are detached in another task than they were attached in.

Symptom: each stream that ends early logs an error about a token from a different context, and spans
stay current in tasks that have nothing to do with them. Right: no such error in any service;
requests behind them have traces of their own and the right parents; in a fresh task no span is
current. Reported in public of instrumentations that keep a span current over a generator's yields,
which another task may close.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from pathlib import Path

import grpc
import pytest
from opentelemetry import context, trace
from structlog.testing import capture_logs

from tests.support.traced_stack import (
    TracedStack,
    assert_whole,
    chain_under,
    chat_request,
    read_all,
    traced_stack,
)

AT_ONCE = 15
NUM_NORMAL = 20
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gateway", "target_service", "draft_service", "outrider")
AMBIENT = re.compile(
    r"start_as_current_span|\buse_span\(|context\w*\.(attach|detach)\(|set_tracer_provider"
    r"|import .*\b(attach|detach)\b"
)


async def complete(stack: TracedStack, number: int) -> None:
    """Read to its end."""
    assert await read_all(stack.gateway, chat_request(f"river {number}", 20)) == 20


async def close_early(stack: TracedStack, number: int) -> None:
    """The client has enough after three messages."""
    call = stack.gateway.stub.Generate(chat_request(f"sea {number}", 450), timeout=60)
    for _ in range(3):
        await call.read()
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def run_into_its_deadline(stack: TracedStack, number: int) -> None:
    """Far too short for what it asks."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stack.gateway, chat_request(f"hill {number}", 450), timeout_s=0.4)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


WAYS = (complete, close_early, run_into_its_deadline)


async def current_span() -> trace.Span:
    """What a task that was just made believes to be in."""
    return trace.get_current_span()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "count", [45, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_early_ends_detach_nothing(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """A third of the streams completes, a third is closed, a third runs into its deadline."""
    with capture_logs() as lines:
        async with traced_stack(tiny_model, kv_tokens=16384, max_sequences=AT_ONCE) as stack:
            for first in range(0, count, AT_ONCE):
                numbers = range(first, min(first + AT_ONCE, count))
                await asyncio.gather(*(WAYS[n % len(WAYS)](stack, n) for n in numbers))
            gc.collect()
            await stack.wait_ended()
            spans = stack.spans
            outcomes = Counter(span.attributes["outrider.outcome"] for span in spans.of("gateway"))
            completed, closed, late = (len(range(which, count, 3)) for which in range(3))
            assert (outcomes["finished"], outcomes["cancelled"]) == (completed, closed)
            # One whose deadline passes on the way has never arrived.
            assert late / 2 < outcomes["failed"] <= late
            for span in spans.of("gateway"):
                chain_under(spans, span)

            spans.all.clear()
            spans.num_started = 0
            await asyncio.gather(*(complete(stack, n) for n in range(NUM_NORMAL)))
            gc.collect()
            await stack.wait_ended()
            assert len({span.trace_id for span in spans.of("gateway")}) == NUM_NORMAL
            for span in spans.of("gateway"):
                assert span.parent_span_id == ""
                assert_whole(chain_under(spans, span))
            assert await asyncio.create_task(current_span()) is trace.INVALID_SPAN
            assert context.get_current() == {}
    said = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert said == []
    assert [line for line in lines if line["log_level"] == "error"] == []
    assert "detach" not in caplog.text


def test_no_span_is_ever_current() -> None:
    """What cannot be attached cannot be detached in the wrong place: nothing of ours does."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if AMBIENT.search(line)
    ]
    assert found == []
