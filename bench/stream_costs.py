"""Processor time of one stream's tokens, by process and thread: what a service adds to the engine.

    python -m bench.stream_costs --tokens 256 --rounds 5

Gateway, target and client are processes. The target's steps run on a thread of their own, which
the event loop does not wait for, so its main thread's time is what admission, planning and writing
take. The engine alone, asked for the same, is the comparison. Milliseconds a token; processor time
and not that of a clock, so that a busy machine changes it little. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from bench.peers import engines
from bench.peers.prompts import prompts
from bench.peers.worker import Worker
from bench.process_use import tree_of
from outrider.models.resolve import resolve
from outrider.serving.cores import usable_cores


def service_of(pid: int) -> str:
    """gateway, target, or client for the worker itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    for service in ("gateway", "target"):
        if words[1:4] == [b"-m", b"outrider", service.encode()]:
            return service
    return "client"


def times(worker: Worker) -> dict[str, float]:
    """Seconds so far, by process and kind of thread."""
    result: dict[str, float] = {}
    for pid in tree_of(worker.pid):
        service = service_of(pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            kind = "main thread" if int(task.name) == pid else "other threads"
            name = f"{service}, {kind}"
            with contextlib.suppress(OSError):  # it has ended
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                result[name] = result.get(name, 0.0) + nanoseconds / 1e9
    return result


def costs(
    worker: Worker, texts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, list[float]]:
    """Milliseconds a token of each text, by process and kind of thread."""
    worker.ask(texts[:1], num_tokens)
    result: dict[str, list[float]] = {}
    for text in texts:
        before = times(worker)
        answer = worker.ask([text], num_tokens)
        after = times(worker)
        # A thread that ended meanwhile takes its time with it.
        spent = {name: max(0.0, value - before.get(name, 0.0)) for name, value in after.items()}
        for name, seconds in (spent | {"clock": answer.seconds}).items():
            result.setdefault(name, []).append(1000 * seconds / num_tokens)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--dtype", default="int8")
    options = parser.parse_args(arguments)
    texts = list(islice(prompts(resolve(engines.MODEL)), options.rounds))
    makers: dict[str, Callable[[], Worker]] = {
        "services": lambda: engines.outrider(options.dtype, options.threads, "gateway"),
        "engine": lambda: engines.engine(options.dtype, options.threads),
    }
    report = {}
    for form, make in makers.items():
        worker = make()
        try:
            measured = costs(worker, texts, options.tokens)
        finally:
            worker.close()
        report[form] = {name: round(statistics.median(each), 3) for name, each in measured.items()}
        print(form)
        for name, value in report[form].items():
            print(f"  {name:24}{value:8.3f} ms a token")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
