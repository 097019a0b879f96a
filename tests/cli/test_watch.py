"""Services whose process lives but which do not serve."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cli.stack import Child, Stack
from outrider.cli.watch import HealthWatch
from outrider.serving.settings import DraftSettings

Status = health_pb2.HealthCheckResponse


@dataclass
class World:
    """A process that does nothing, a health service that speaks for it, and who watches."""

    child: Child
    watch: HealthWatch
    said: list[str]
    set_serving: Callable[[bool], None]

    def look_until(self, num_lines: int) -> None:
        """Look until so many lines have been said."""
        deadline = time.monotonic() + 10
        while len(self.said) < num_lines:
            assert time.monotonic() < deadline, self.said
            self.watch.look()


def world_of(service: str) -> Iterator[World]:
    """A world in which `service` runs and serves."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stack = Stack(lambda service, line: None)
    child = stack.children[service] = Child(service, DraftSettings(port=port), process)
    said: list[str] = []

    def set_serving(serving: bool) -> None:
        servicer.set("", Status.SERVING if serving else Status.NOT_SERVING)

    set_serving(True)
    watch = HealthWatch(stack, said.append, every_s=0.02, patience_s=0.1, start_s=5)
    try:
        yield World(child, watch, said, set_serving)
    finally:
        process.kill()
        process.wait(timeout=5)
        server.stop(0).wait(5)


@pytest.fixture
def target() -> Iterator[World]:
    """A target."""
    yield from world_of("target")


@pytest.fixture
def draft() -> Iterator[World]:
    """A drafter."""
    yield from world_of("draft")


def test_a_target_that_stays_not_serving_is_named_once(target: World) -> None:
    """One line when it has stopped for a while, one when it serves again, none for a moment."""
    for _ in range(10):
        target.watch.look()
    target.set_serving(False)
    target.look_until(1)
    for _ in range(10):
        target.watch.look()
        time.sleep(0.02)
    assert target.said == ["target runs but has not served for 0 s"]
    target.set_serving(True)
    target.look_until(2)
    assert target.said[1] == "target serves again"
    assert target.child.process.poll() is None


def test_a_drafter_that_stays_not_serving_is_ended(draft: World) -> None:
    """Nothing is lost with it, and who looks after its process starts a new one."""
    draft.watch.look()
    draft.set_serving(False)
    draft.look_until(1)
    assert draft.child.process.wait(timeout=5) != 0
    draft.watch.look()
    assert draft.said == ["draft runs but has not served for 0 s; it is ended"]


def test_a_service_that_still_starts_is_left_alone(draft: World) -> None:
    """A model may take its time to load."""
    draft.set_serving(False)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        draft.watch.look()
    assert draft.said == []
    assert draft.child.process.poll() is None
