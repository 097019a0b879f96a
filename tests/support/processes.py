"""The real services as processes of their own, for tests that kill, stop or drain them.

    async with running_process("draft", log_folder=tmp_path) as draft:
        ...                          # draft.address is a port that was free
        draft.kill()

Whatever a test does, the process is gone at the end: it is killed there, and the kernel ends it
when the test's own process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.serving.channel import open_channel
from tests.support.precision import chosen_dtype

START_S = 60.0
STOP_S = 30.0
_POLL_S = 0.02
_ROOT = Path(__file__).resolve().parents[2]
_PATH = os.pathsep.join([str(_ROOT), str(_ROOT / "kernels")])


class ServiceProcess:
    """One service: `outrider gateway`, `target` or `draft`, with its log in a file."""

    def __init__(self, service: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.service = service
        self.process = process
        self.port = 0
        self.metrics_port = 0
        self.http_port = 0
        self._log = log

    @property
    def address(self) -> str:
        """Where it listens, once `wait_listening` has returned."""
        return f"127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        """Everything that it has written so far, on either stream."""
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its log lines; what is no JSON object is left out."""
        events = []
        for line in self.output.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
        return events

    async def wait_event(self, name: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The first log line of that event. AssertionError if the process ends before."""
        async with asyncio.timeout(timeout_s):
            while True:
                ended = self.process.poll() is not None
                for event in self.events:
                    if event.get("event") == name:
                        return event
                assert not ended, f"{self.service} ended:\n{self.output}"
                await asyncio.sleep(_POLL_S)

    async def wait_listening(self, timeout_s: float = START_S) -> None:
        """Return when it takes calls; its ports are known from then on."""
        event = await self.wait_event("listening", timeout_s)
        self.port, self.metrics_port = event["port"], event["metrics_port"]
        self.http_port = event.get("http_port", 0)

    async def wait_serving(self, timeout_s: float = START_S) -> None:
        """Return when its health is SERVING."""
        async with asyncio.timeout(timeout_s), open_channel(self.address) as channel:
            while not await is_serving(channel):
                await asyncio.sleep(_POLL_S)

    async def wait_exit(self, timeout_s: float = STOP_S) -> int:
        """Its exit status; negative for a signal."""
        async with asyncio.timeout(timeout_s):
            while self.process.poll() is None:
                await asyncio.sleep(_POLL_S)
        return self.process.returncode

    def terminate(self) -> None:
        """SIGTERM: please drain."""
        self.process.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no goodbye on the wire, but the kernel closes the connections."""
        self.process.kill()


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """Whether the health service answers SERVING."""
    request = health_pb2.HealthCheckRequest()
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
    except grpc.aio.AioRpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def spawn(
    service: str,
    log_folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> ServiceProcess:
    """Start `outrider SERVICE` on a free port, with these settings as flags; returns at once."""
    flags = {"port": 0, "metrics_port": 0, "threads": 1} | settings
    if service == "gateway":
        flags = {"http_port": 0} | flags
        del flags["threads"]
    else:
        flags = {"dtype": chosen_dtype()} | flags
    clean = {
        n: value for n, value in os.environ.items() if not n.startswith(("OUTRIDER_", "OTEL_"))
    }
    log = log_folder / f"{service}-{uuid.uuid4().hex[:8]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outrider", service),
                *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
                f"--with-parent={os.getpid()}",
            ],
            cwd=log_folder,
            env=clean | {"PYTHONPATH": _PATH} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return ServiceProcess(service, process, log)


@contextlib.contextmanager
def killed_at_end(process: ServiceProcess) -> Iterator[ServiceProcess]:
    """The process, which is gone when the block ends."""
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.kill()  # reaches a stopped process too
        process.process.wait(STOP_S)


@contextlib.asynccontextmanager
async def running_process(
    service: str, log_folder: Path, **settings: object
) -> AsyncIterator[ServiceProcess]:
    """A service that takes calls; killed at the end if it still lives."""
    with killed_at_end(spawn(service, log_folder, **settings)) as process:
        await process.wait_listening()
        yield process


def ends(pid: int, within_s: float) -> bool:
    """The process is gone, or a zombie, before the time is over."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
