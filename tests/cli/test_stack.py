"""Services as child processes: healthy or an error that says why, and gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from outrider.cli.demo import free_ports
from outrider.cli.log_lines import readable
from outrider.cli.stack import Stack, StackError
from outrider.serving.settings import DraftSettings
from tests.support.processes import ends


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A stack whose children never outlive the test."""
    made = Stack(lambda service, line: None)
    yield made
    made.kill()


def test_a_service_starts_serves_and_drains(stack: Stack) -> None:
    """Healthy after the wait; SIGTERM ends it with status 0."""
    stack.start("draft", DraftSettings(port=free_ports(1)[0], metrics_port=0))
    stack.wait_healthy(["draft"], timeout_s=15)
    assert stack.stop() == {"draft": 0}


def test_a_service_that_cannot_start_says_why(stack: Stack) -> None:
    """The error names the service, its status and its own last words."""
    stack.start(
        "draft",
        DraftSettings(
            port=free_ports(1)[0], metrics_port=0, proposer="model", model="/crystal-ball"
        ),
    )
    with pytest.raises(StackError, match=r"(?s)draft ended with status 1.*crystal-ball"):
        stack.wait_healthy(["draft"], timeout_s=15)


def test_a_taken_port_is_named(stack: Stack) -> None:
    """Another server on the port, which serves all the while, is not mistaken for ours."""
    settings = DraftSettings(port=free_ports(1)[0], metrics_port=0)
    stack.start("draft", settings)
    stack.wait_healthy(["draft"], timeout_s=15)
    other = Stack(lambda service, line: None)
    other.start("draft", settings)
    with pytest.raises(StackError, match=f"(?s)ended with status 1.*127.0.0.1:{settings.port}"):
        other.wait_healthy(["draft"], timeout_s=15)


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_service_that_says_little_is_known_to_listen(level: str) -> None:
    """Lines below its level are not shown, and it is waited for all the same."""
    lines: list[str] = []
    stack = Stack(lambda service, line: lines.append(line))
    settings = DraftSettings(port=free_ports(1)[0], metrics_port=0, log_level=level)
    try:
        stack.start("draft", settings)
        stack.wait_healthy(["draft"], timeout_s=15)
        assert stack.stop() == {"draft": 0}
    finally:
        stack.kill()
    assert any('"listening"' in line for line in lines) is (level == "info")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_children_end_when_their_parent_is_killed() -> None:
    """Even SIGKILL on `up` leaves no service behind."""
    code = f"""
        import time
        from outrider.cli.stack import Stack
        from outrider.serving.settings import DraftSettings
        stack = Stack(lambda service, line: None)
        stack.start("draft", DraftSettings(port={free_ports(1)[0]}, metrics_port=0))
        stack.wait_healthy(["draft"], timeout_s=15)
        print(stack.children["draft"].process.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(timeout=5)
    gone = ends(child, within_s=10)
    if not gone:
        os.kill(child, signal.SIGKILL)
    assert gone


def test_log_lines_are_readable() -> None:
    """JSON log lines become level, event and values; other lines stay as they are."""
    line = (
        '{"event": "listening", "level": "info", "port": 5, "service": "draft", "timestamp": "x"}'
    )
    assert readable(line).split() == ["info", "listening", "port=5"]
    assert readable("plain text") == "plain text"
    assert readable("17") == "17"


FORGED = "\x1b]0;pwn\x07\x1b[31mred\nerror   the engine is dead  reason=fake\u2028\x9b1m"


def test_nothing_in_a_log_line_makes_two_or_steers_the_terminal() -> None:
    """Whatever a client calls its request, in values, events and tracebacks."""
    for entry in (
        {"event": "e", "request_id": FORGED},
        {"event": FORGED, "level": "info"},
        {"event": "e", "level": FORGED},
        {"event": "e", "ids": [FORGED]},
        {"event": "e", FORGED: 1},
    ):
        assert readable(json.dumps(entry)).isprintable()
    assert readable(FORGED).isprintable()
    assert readable(json.dumps({"event": "e", "id": "a b=1"})).endswith("id='a b=1'")
    shown = readable(json.dumps({"event": "e", "exception": f"Trace:\n  {FORGED}"}))
    assert shown.split("\n")[3] == "  error   the engine is dead  reason=fake\\u2028\\x9b1m"
    assert shown.replace("\n", "").isprintable()
