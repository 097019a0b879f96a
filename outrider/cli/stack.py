"""Three services as child processes of this one: start, wait until healthy, watch, drain in order.

Knows nothing of what the services do. Children are in process groups of their own, so that Ctrl-C
reaches this process alone and the order of the drain is ours; each asks the kernel to end it when
this process dies.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.log_lines import entry_of, readable
from outrider.cli.options import CONFIG_VARIABLE, to_flags
from outrider.serving.settings import LOG_LEVELS

START_TIMEOUT_S = 120.0
# What a drain may take beyond the grace that the service itself has: the last step, and 3 s for the
# last spans where a collector does not answer.
STOP_MARGIN_S = 10.0
STOP_ORDER = ("gateway", "target", "draft")

LineSink = Callable[[str, str], None]
"""Told (service, one line that it wrote)."""


class StackError(Exception):
    """A service did not start, or died; the message says which and what it said last."""


@dataclass
class Child:
    """One service's process."""

    service: str
    settings: Any
    process: subprocess.Popen[str]
    last_lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=12))
    reader: threading.Thread | None = None
    listening: threading.Event = field(default_factory=threading.Event)
    """It has said so: whoever answers at its address is this process."""
    metrics_port: int = 0
    """Known once it listens; 0 for none."""
    http_port: int = 0
    """The same for a gateway's HTTP."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.settings.host}:{self.settings.port}"

    def how_it_ended(self) -> str:
        """One line. The process must have ended."""
        status = self.process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self.service} ended with {how}"

    def obituary(self) -> str:
        """How it ended, and its last words."""
        if self.reader is not None:
            self.reader.join(timeout=2)
        words = "\n".join(f"  {readable(line)}" for line in self.last_lines)
        return self.how_it_ended() + (f"; it said:\n{words}" if words else "")


class Stack:
    """The children, by service name."""

    def __init__(self, on_line: LineSink) -> None:
        self.children: dict[str, Child] = {}
        self._on_line = on_line

    def start(self, service: str, settings: Any) -> None:
        """Start one service."""
        # That it listens is said at this level. What nobody wants to see ends here.
        level = "debug" if settings.log_level == "debug" else "info"
        flags = to_flags(dataclasses.replace(settings, log_level=level))
        command = [sys.executable, "-m", "outrider", service, *flags]
        # Its flags say everything, so a file is not read a second time.
        environment = {k: v for k, v in os.environ.items() if k != CONFIG_VARIABLE}
        process = subprocess.Popen(
            [*command, f"--with-parent={os.getpid()}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        child = Child(service, settings, process)
        child.reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        child.reader.start()
        self.children[service] = child

    def _read(self, child: Child) -> None:
        output: IO[str] | None = child.process.stdout
        assert output is not None
        with output:
            for line in output:
                self._take(child, line.rstrip("\n"))

    def _take(self, child: Child, line: str) -> None:
        entry = entry_of(line) or {}
        if entry.get("event") == "listening":
            child.metrics_port = entry.get("metrics_port") or 0
            child.http_port = entry.get("http_port") or 0
            child.listening.set()
        shown = LOG_LEVELS[LOG_LEVELS.index(child.settings.log_level) :]
        if entry.get("level") in LOG_LEVELS and entry["level"] not in shown:
            return
        child.last_lines.append(line)
        self._on_line(child.service, line)

    def wait_healthy(
        self,
        services: Iterable[str],
        stopping: threading.Event | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Return when all of them listen themselves and serve, or when `stopping` is set.

        Raises StackError when one ends or the time is over.
        """
        stopping = stopping or threading.Event()
        deadline = time.monotonic() + timeout_s
        for service in services:
            child = self.children[service]
            while not (child.listening.is_set() and serves(child)):
                if stopping.wait(0.05):
                    return
                self.raise_if_dead(self.children)
                if time.monotonic() > deadline:
                    raise StackError(f"{service} is not healthy after {timeout_s:g} s")
        # The first may have ended while the last one started.
        self.raise_if_dead(self.children)

    def raise_if_dead(self, services: Iterable[str]) -> None:
        """Raise StackError for the first of them that has ended."""
        for service in services:
            child = self.children[service]
            if child.process.poll() is not None:
                raise StackError(child.obituary())

    def stop(self) -> dict[str, int]:
        """Drain one after the other; the exit status of each. One that overstays is killed."""
        statuses = {}
        for service in STOP_ORDER:
            child = self.children.get(service)
            if child is None:
                continue
            if child.process.poll() is None:
                child.process.terminate()
                try:
                    child.process.wait(child.settings.grace_s + STOP_MARGIN_S)
                except subprocess.TimeoutExpired:
                    child.process.kill()
            statuses[service] = child.process.wait()
            if child.reader is not None:
                child.reader.join(timeout=2)
        return statuses

    def kill(self) -> None:
        """End all at once. For a signal handler: takes none of the locks that Popen has."""
        left = [c.process for c in self.children.values() if c.process.returncode is None]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(ChildProcessError):
                _, status = os.waitpid(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)


def serves(child: Child) -> bool:
    """It says that it takes requests."""
    if child.settings.tls_cert:
        # Its own port may ask for a certificate that is not ours to show.
        return _is_ready(child.settings.metrics_host, child.metrics_port)
    with grpc.insecure_channel(child.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False
