"""`outrider up` with real services on a tiny model: ready, answering, drained in order."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cli.demo import free_ports
from outrider.cli.generate import generate
from protos.outrider.v1 import inference_pb2, inference_pb2_grpc
from tests.support.processes import ends
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


class Up:
    """A running `outrider up` and its output."""

    def __init__(self, arguments: list[str], before: Sequence[str] = ()) -> None:
        gateway, target, draft = free_ports(3)
        self.gateway = f"127.0.0.1:{gateway}"
        command = [*before, sys.executable, "-m", "outrider", "up", f"--gateway-port={gateway}"]
        command += [f"--target-port={target}", f"--draft-port={draft}", "--gateway-http-port=0"]
        command += [f"--{each}-metrics-port=0" for each in ("gateway", "target", "draft")]
        command += arguments
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Return when a line holds `text`; fail when the output ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while (line := self._queue.get(timeout=max(0.01, deadline - time.monotonic()))) is not None:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"{text!r} never came:\n" + "\n".join(self.lines))

    def rest(self) -> list[str]:
        """All lines, once the process has ended."""
        self._reader.join(timeout=10)
        while not self._queue.empty():
            if (line := self._queue.get()) is not None:
                self.lines.append(line)
        return self.lines

    def child(self, service: str) -> int:
        """The process id of one service."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in children.split():
            if service in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return int(pid)
        raise AssertionError(f"no child is {service}")


@contextmanager
def running(*arguments: str, before: Sequence[str] = ()) -> Iterator[Up]:
    """`outrider up` that never outlives the test. before: a command that runs it."""
    up = Up(list(arguments), before)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait(timeout=10)
        up.rest()
        assert up.process.stdout is not None
        up.process.stdout.close()


def test_up_answers_survives_its_drafter_and_drains_in_order(model: Path) -> None:
    """Ready; an answer; SIGKILL on the drafter costs no request and brings a new one; Ctrl-C drains
    gateway, target, draft in that order and the exit status is 0."""
    with running(f"--model={model}") as up:
        up.wait_for("ready: ")
        ask = ["--address", up.gateway, "--max-tokens", "4", "--ignore-eos", "the sea"]
        assert CliRunner().invoke(generate, ask).exit_code == 0
        os.kill(up.child("draft"), signal.SIGKILL)
        assert CliRunner().invoke(generate, ask).exit_code == 0
        up.wait_for("draft ended with signal SIGKILL; a new one starts")
        up.wait_for("drafter ready")
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=30) == 0
        ended = [line.split()[0] for line in up.rest() if line.endswith("stopped")]
        assert ended == ["gateway", "target", "draft"]


def test_up_says_which_service_did_not_start_and_why(model: Path, tmp_path: Path) -> None:
    """A model that is not there ends everything with a non-zero status and a reason."""
    with running(f"--model={tmp_path / 'nothing-here'}") as up:
        assert up.process.wait(timeout=60) == 1
        text = "\n".join(up.rest())
        assert "nothing-here" in text
        assert "ended with status 1" in text


@pytest.mark.parametrize(
    "flag", ["--gateway-port", "--gateway-http-port", "--target-port", "--draft-metrics-port"]
)
def test_up_never_takes_a_stranger_for_its_own(model: Path, flag: str) -> None:
    """Somebody who serves on a port of ours: the flag for another one is named, nothing starts, and
    nobody is said to be ready."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with running(f"--model={model}", f"{flag}={port}") as up:
            assert up.process.wait(timeout=60) == 1
            (line,) = up.rest()
    finally:
        server.stop(0).wait(5)
    service = flag.removeprefix("--").partition("-")[0]
    assert line.startswith(f"Error: {service} cannot listen on 127.0.0.1:{port}: the port is taken")
    assert line.endswith(f"give it another one with {flag}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_signal_kills(model: Path) -> None:
    """While a drain waits for a long answer, the second Ctrl-C ends all processes at once."""
    with running(f"--model={model}", "--no-draft") as up:
        up.wait_for("ready: ")
        children = [up.child("gateway"), up.child("target")]
        # A stopped process cannot drain, so the first signal alone would wait for its grace.
        os.kill(children[0], signal.SIGSTOP)
        up.process.send_signal(signal.SIGTERM)
        up.wait_for("draining; a second signal kills")
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(timeout=10) == 128 + signal.SIGTERM
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["plain", "nohup"])
def test_answers_come_to_their_end_when_up_is_killed(model: Path, before: list[str]) -> None:
    """SIGKILL on `up` is a drain of its services: open answers end as they would, then all go."""
    request = inference_pb2.GenerateRequest(text="the sea", n=8)
    request.stopping.max_tokens, request.stopping.ignore_eos = 450, True
    with running(f"--model={model}", before=before) as up:
        up.wait_for("ready: ")
        children = [up.child(service) for service in ("gateway", "target", "draft")]
        with grpc.insecure_channel(up.gateway) as channel:
            answer = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
            messages = [next(answer)]
            up.process.kill()
            messages += answer
        finishes = [m.finish for m in messages if m.WhichOneof("event") == "finish"]
        assert [each.usage.completion_tokens for each in finishes] == [450] * 8
        assert all(ends(child, within_s=20) for child in children)
