"""A gateway in front of a paced target, each a process of its own, and what the gateway uses."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.process_use import memory_of, processor_s
from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.models.resolve import display_name, resolve
from outrider.serving.settings import GatewaySettings

_ANSWER = "The gateway reads what the target says and hands it on, a word at a time. "


@dataclass(frozen=True)
class PacedStack:
    """The two processes."""

    model: str
    """As clients call it."""
    target: str
    grpc: str
    http: str
    """Addresses."""
    gateway_pid: int
    times: Path
    """What the target notes."""

    @property
    def rss_mb(self) -> float:
        """Resident memory of the gateway, in MB."""
        return memory_of(self.gateway_pid).resident / 1e6

    @property
    def cpu_s(self) -> float:
        """Seconds that the gateway has computed."""
        return processor_s(self.gateway_pid)

    def noted(self) -> dict[str, tuple[int, list[int]]]:
        """Of each request that has ended: when it came to the target, when its tokens went."""
        notes = [json.loads(line) for line in self.times.read_text().splitlines()]
        return {request_id: (received, sent) for request_id, received, sent in notes}


@contextlib.contextmanager
def paced_stack(model: str, *, interval_ms: float = 50.0, **settings: Any) -> Iterator[PacedStack]:
    """Both processes, until the block ends; `settings` are the gateway's.

    model: a name or folder, of which only the tokenizer is used.
    """
    folder = resolve(model, weights=False)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_ANSWER).ids
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as undo:
        times = Path(scratch) / "times"
        target = undo.enter_context(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.paced_target", str(folder)),
                    *(",".join(map(str, ids)), str(times), f"--interval-ms={interval_ms}"),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        undo.callback(target.kill)
        assert target.stdout is not None
        address = f"127.0.0.1:{int(target.stdout.readline())}"
        grpc_port, http_port = free_ports(2)
        gateway = Stack(lambda service, line: None)
        undo.callback(gateway.stop)
        gateway.start(
            "gateway",
            GatewaySettings(
                model=model,
                targets=address,
                port=grpc_port,
                http_port=http_port,
                metrics_port=-1,
                grace_s=1.0,
                **settings,
            ),
        )
        gateway.wait_healthy(["gateway"])
        yield PacedStack(
            display_name(model),
            address,
            f"127.0.0.1:{grpc_port}",
            f"127.0.0.1:{http_port}",
            gateway.children["gateway"].process.pid,
            times,
        )
