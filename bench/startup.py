"""`outrider up`, from the command to ready and to a first token, split by service; and its memory.

Several starts one after the other, the model being in the cache. A start counts as over when the
gateway's /readyz says so. Prints a table and, as its last line, JSON.

    python -m bench.startup --starts 5 --dtype int8
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO

from bench.process_use import Memory, children_of, memory_of, processor_s
from outrider.cli.client import Client
from outrider.cli.demo import free_ports, question
from outrider.cli.stack import STOP_ORDER
from outrider.serving.settings import DTYPES

START_LIMIT_S = 120.0
_NUMBER = re.compile(r"\b(imported_s|ready_s|load_s|warm_s)=([0-9.]+)")


@dataclass
class Start:
    """One `outrider up`."""

    ready_s: float = 0.0
    first_token_s: float = 0.0
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """By service: `imported_s` and `ready_s` since its process began, of which load and warm."""
    processor_s: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


@contextlib.contextmanager
def outrider_up(flags: list[str], lines: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command, with what it says in `lines`; told to end, and waited for, at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "up", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    output = process.stderr
    assert output is not None
    reader = threading.Thread(target=_read, args=(output, lines))
    reader.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        reader.join()


def _read(output: IO[str], lines: list[str]) -> None:
    with output:
        lines.extend(iter(output.readline, ""))


def is_ready(port: int) -> bool:
    """What /readyz of a service says; False while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False


def one_start(flags: list[str]) -> Start:
    """Start, wait, ask for one token, look, end. RuntimeError for a start that fails."""
    gateway, target, draft, metrics, others, more = free_ports(6)
    flags = [
        *(f"--gateway-port={gateway}", f"--target-port={target}", f"--draft-port={draft}"),
        *(f"--gateway-metrics-port={metrics}", "--gateway-http-port=-1"),
        *(f"--target-metrics-port={others}", f"--draft-metrics-port={more}"),
        *flags,
    ]
    lines: list[str] = []
    found, begin_s = Start(), time.monotonic()
    with outrider_up(flags, lines) as process:
        while not is_ready(metrics):
            if process.poll() is not None or time.monotonic() - begin_s > START_LIMIT_S:
                raise RuntimeError("it does not start; it said:\n" + "".join(lines))
            time.sleep(0.02)
        found.ready_s = time.monotonic() - begin_s
        with Client(f"127.0.0.1:{gateway}") as client:
            next(iter(client.generate(question("Hello", "off", 1), START_LIMIT_S)))
        found.first_token_s = time.monotonic() - begin_s
        for pid in children_of(process.pid):
            name = _service_of(pid)
            found.processor_s[name] = processor_s(pid)
            found.memory[name] = memory_of(pid)
    found.phases = phases_in(lines)
    return found


def _service_of(pid: int) -> str:
    """The word of its command that names it."""
    with open(f"/proc/{pid}/cmdline") as file:
        words = file.read().split("\0")
    return next(word for word in words if word in STOP_ORDER)


def phases_in(lines: list[str]) -> dict[str, dict[str, float]]:
    """The times that each service's lines name, by service."""
    phases: dict[str, dict[str, float]] = {}
    for line in lines:
        service, _, rest = line.partition(" ")
        for name, seconds in _NUMBER.findall(rest):
            phases.setdefault(service, {})[name] = float(seconds)
    return phases


def table_of(starts: list[Start]) -> str:
    """Medians, a line for each service."""
    lines = [f"{'':10}{'imports':>9}{'load':>8}{'warm':>8}{'rest':>8}{'ready':>8}{'CPU s':>8}"]
    lines[0] += f"{'RSS MB':>9}{'PSS MB':>8}{'private':>9}{'peak':>8}"
    for service in STOP_ORDER:
        if service not in starts[0].phases:
            continue
        phases = {
            name: statistics.median(s.phases[service].get(name, 0.0) for s in starts)
            for name in ("imported_s", "load_s", "warm_s", "ready_s")
        }
        rest = phases["ready_s"] - phases["imported_s"] - phases["load_s"] - phases["warm_s"]
        shown = [phases["imported_s"], phases["load_s"], phases["warm_s"], rest, phases["ready_s"]]
        shown.append(statistics.median(s.processor_s[service] for s in starts))
        memory = [
            statistics.median(getattr(s.memory[service], name) for s in starts) / 1e6
            for name in ("resident", "proportional", "private", "peak")
        ]
        lines.append(
            f"{service:10}{shown[0]:9.2f}"
            + "".join(f"{each:8.2f}" for each in shown[1:])
            + "{:9.0f}{:8.0f}{:9.0f}{:8.0f}".format(*memory)
        )
    return "\n".join(lines)


def summary_of(starts: list[Start]) -> dict[str, object]:
    """What the last line says."""

    def spread(values: list[float]) -> dict[str, float]:
        return {
            "median": round(statistics.median(values), 2),
            "least": round(min(values), 2),
            "most": round(max(values), 2),
        }

    return {
        "starts": len(starts),
        "ready_s": spread([start.ready_s for start in starts]),
        "first_token_s": spread([start.first_token_s for start in starts]),
        "processor_s": spread([sum(start.processor_s.values()) for start in starts]),
        "memory": {name: asdict(memory) for name, memory in starts[-1].memory.items()},
    }


def main() -> None:
    """Start several times and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, help="of the target; without: its default")
    parser.add_argument("--draft-model", default="", help="without: n-gram lookup")
    args = parser.parse_args()
    flags = [f"--target-dtype={args.dtype}"] if args.dtype else []
    if args.draft_model:
        flags += ["--draft-proposer=model", f"--draft-model={args.draft_model}"]
        flags += [f"--draft-dtype={args.dtype}"] if args.dtype else []
    starts = []
    for number in range(args.starts):
        starts.append(one_start(flags))
        load = os.getloadavg()[0]
        print(
            f"start {number + 1}: ready after {starts[-1].ready_s:.2f} s, first token after "
            f"{starts[-1].first_token_s:.2f} s (load {load:.1f})",
            flush=True,
        )
    print(table_of(starts))
    print(json.dumps(summary_of(starts)))


if __name__ == "__main__":
    main()
