"""Traces: what travels between services, what is on when, and that nothing is ever ambient."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

from tests.support.otlp import collector

SENDS_ONE = """
from outrider.serving.tracing import Tracing
tracing = Tracing.from_environment("target", "number seven")
assert tracing.enabled
root = tracing.tracer.start_span("generate tiny", Context(), attributes={"outrider.k": 3})
root.add_event("round", {"outrider.accepted": 2})
root.end()
tracing.shutdown(5)
print(format(root.get_span_context().span_id, "016x"))
"""


async def test_a_process_delivers_its_spans_to_a_real_collector() -> None:
    """What the variables ask for: everything that has ended is there after the shutdown."""
    async with collector() as spans:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", textwrap.dedent(SENDS_ONE)),
            env=spans.environment,
            stdout=subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        await spans.wait(lambda: spans.of("target"))
    (span,) = spans.all
    assert (span.name, span.span_id) == ("generate tiny", output.decode().strip())
    assert span.attributes == {"outrider.k": 3}
    assert span.events == [("round", {"outrider.accepted": 2})]
    assert (span.kind, span.status, span.parent_span_id) == ("internal", "unset", "")
