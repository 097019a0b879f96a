"""What a process writes to standard error, whoever says it and by whatever means."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

SCRIPT = """
import logging, threading
from outrider.serving.logs import configure_logging
configure_logging("target", {level!r})
def say_all():
    logging.getLogger("grpc._cython").error("ExecuteBatchError raised in core by method [x]")
    for name in ("outrider.engine.numerics", "some.library", "grpc._cython"):
        for say in ("debug", "info", "warning"):
            getattr(logging.getLogger(name), say)("%s of %s", say, name)
thread = threading.Thread(target=say_all)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("level", "ours", "theirs"),
    [
        ("debug", ["debug", "info", "warning"], ["warning"]),
        ("info", ["info", "warning"], ["warning"]),
        ("error", [], []),
    ],
)
def test_the_standard_librarys_log_comes_out_like_our_own(
    level: str, ours: list[str], theirs: list[str]
) -> None:
    """From any thread, JSON lines with the service and the logger: all of ours, of libraries what
    is amiss. That a client has gone is not, whatever grpc makes of it."""
    script = SCRIPT.format(level=level)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=15, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [(line["logger"], line["level"], line["event"]) for line in lines]
    assert said == [
        (name, each, f"{each} of {name}")
        for name, levels in (
            ("outrider.engine.numerics", ours), ("some.library", theirs), ("grpc._cython", theirs),
        )
        for each in levels
    ]  # fmt: skip
    assert all(line["service"] == "target" for line in lines)


CONTROLS = """
import sys
import structlog
from outrider.serving.logs import configure_logging
configure_logging("target")
forged = "\\x1b]0;pwn\\x07\\x1b[31mred\\nerror   the engine is dead  reason=fake"
log = structlog.get_logger("x")
log.info("request", request_id=forged, ids=[forged], short="a\\x9bb")
log.info(forged)
try:
    raise ValueError(forged)
except ValueError as error:
    log.error("failed", exc_info=error)
"""


def test_no_value_steers_the_terminal_or_makes_two_lines_of_one() -> None:
    """Whatever a client calls its request: on a terminal only the renderer's colours are left."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as reader, os.fdopen(theirs, "w") as terminal:
        subprocess.run([sys.executable, "-c", CONTROLS], stderr=terminal, timeout=15, check=True)
        said = reader.read(1 << 16).decode().replace("\r\n", "\n")
    lines = re.sub(r"\x1b\[[0-9]*m", "", said).splitlines()
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.startswith(("error", "Value", "20"))] == [
        lines[0],
        lines[1],
        lines[2],
    ]
    assert "short=a\\x9bb" in lines[0]
    assert lines[-1] == "  error   the engine is dead  reason=fake"


FLOOD = """
import logging, threading
from outrider.serving.logs import configure_logging
configure_logging("target", "info")
def say_all():
    for count in range(100):
        for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk", {ours!r}):
            logging.getLogger(name).warning("away, %s", count)
threads = [threading.Thread(target=say_all) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
logging.getLogger("some.library").warning("heard")
"""


@pytest.mark.parametrize("how", ["nobody_reads", "closed"])
def test_a_line_that_cannot_be_written_ends_nothing(how: str) -> None:
    """Where standard error is a pipe that nobody reads any more, or is closed, work goes on."""
    script = """if True:
        import logging, os, structlog
        from outrider.serving.logs import configure_logging
        configure_logging("target")
        log = structlog.get_logger("test")
        for _ in range(3):
            log.error("a step failed", exc_info=ValueError("bad"))
            logging.getLogger("some.library").warning("heard")
        print("went on")
    """
    reader, writer = os.pipe()
    os.close(reader)
    shell = f'exec "{sys.executable}" -c "$0"' + (" 2>&-" if how == "closed" else "")
    with os.fdopen(writer, "wb") as nowhere:
        done = subprocess.run(
            ["sh", "-c", shell, script], stdout=subprocess.PIPE, stderr=nowhere, timeout=15
        )
    assert done.stdout == b"went on\n"


def test_what_a_client_calls_a_trace_is_no_news() -> None:
    """Malformed headers make no line, and none that a collector's trouble would have had."""
    script = """if True:
        import logging
        from outrider.serving.logs import configure_logging
        from outrider.serving.tracing import remote_context
        configure_logging("target")
        good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        remote_context([("traceparent", good + "x" * 1000)])
        for state in ("a" * 2000, "=", "a=1,a=2"):
            remote_context([("traceparent", good), ("tracestate", state)])
        logging.getLogger("opentelemetry.sdk").warning("away")
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=15, check=True
    )
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["away"]


def test_a_collector_that_is_away_does_not_fill_the_log() -> None:
    """One line a minute, whoever says it, and nothing else is kept back."""
    script = FLOOD.format(ours="outrider.serving.span_export")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=15, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["away, 0", "heard"]
