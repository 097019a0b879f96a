"""What the bench of start-up makes of processes and of their log lines."""

from __future__ import annotations

import os
import subprocess
import sys

from bench.process_use import Memory, children_of, memory_of, processor_s
from bench.startup import Start, phases_in, summary_of, table_of

LINES = [
    "draft   info    listening  host=127.0.0.1 port=3 imported_s=0.5 ready_s=0.75\n",
    "target  info    model loaded  model=x load_s=1.25 warm_s=0.5\n",
    "target  info    listening  port=2 imported_s=2.0 ready_s=4.0\n",
    "ready: 127.0.0.1:1 (gRPC)\n",
]


def test_phases_are_read_from_the_services_lines() -> None:
    """By service; lines that tell no time are left out."""
    assert phases_in(LINES) == {
        "draft": {"imported_s": 0.5, "ready_s": 0.75},
        "target": {"load_s": 1.25, "warm_s": 0.5, "imported_s": 2.0, "ready_s": 4.0},
    }


def test_what_is_said_of_starts() -> None:
    """Medians in the table, with what no phase explains; spread and processor time in the JSON."""
    starts = [
        Start(ready, ready + 0.5, phases_in(LINES), {"draft": 1.0, "target": 3.0}, memory)
        for ready in (5.0, 7.0, 6.0)
        for memory in [{name: Memory(9_000_000, 8, 7, 10) for name in ("draft", "target")}]
    ]
    lines = table_of(starts).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["target", "draft"]
    assert lines[1].split()[1:8] == ["2.00", "1.25", "0.50", "0.25", "4.00", "3.00", "9"]
    said = summary_of(starts)
    assert said["ready_s"] == {"median": 6.0, "least": 5.0, "most": 7.0}
    assert said["processor_s"] == {"median": 4.0, "least": 4.0, "most": 4.0}


def test_a_process_is_found_and_its_use_read() -> None:
    """A child that works: time goes up, memory adds up."""
    code = "x = bytearray(40_000_000); n = sum(range(3_000_000)); print(n); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in children_of(os.getpid())
        assert processor_s(child.pid) > 0
        memory = memory_of(child.pid)
        assert 40_000_000 <= memory.private <= memory.resident <= memory.peak
        assert memory.private <= memory.proportional <= memory.resident
        child.communicate(b"\n")
