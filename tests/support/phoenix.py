"""A real Arize Phoenix: takes spans in over OTLP, and gives them back over its own HTTP interface.

    python = phoenix_python()            # from a venv of its own, made once and then kept
    async with running_phoenix(python, "shop") as phoenix:
        spawn("gateway", folder, environment=phoenix.environment)
        spans = await phoenix.wait_spans(60)

It knows no links and no resources: a span has no service there, only its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.cli.demo import free_ports
from tests.support.otlp import environment_for
from tests.support.prometheus import read_page
from tests.support.venvs import venv_python

PACKAGE = "arize-phoenix==20.26.1"
START_S = 180.0
"""Its first start compiles all its modules."""
STOP_S = 30.0
_POLL_S = 0.1
_PAGE = 1000


@dataclass(frozen=True)
class StoredSpan:
    """A span as Phoenix gives it back. Ids are hexadecimal, as in a traceparent."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    """Empty for a root."""
    kind: str
    """What Phoenix makes of it, for example LLM."""
    start: datetime
    end: datetime
    status: str
    """UNSET, OK or ERROR."""
    attributes: dict[str, Any]
    events: list[dict[str, Any]]


class Phoenix:
    """A running one, for the spans of one project."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, ports: tuple[int, int], project: str
    ) -> None:
        """ports: of its web page and of OTLP over gRPC."""
        self.process = process
        self.ports = ports
        self.environment = environment_for(ports[1]) | {
            "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={project}"
        }
        """What makes a service process send its spans here."""
        self._log = log
        self._url = f"http://127.0.0.1:{ports[0]}"
        self._project = project

    async def spans(self) -> list[StoredSpan]:
        """All that it has of the project; none before the first has come."""
        if self._project not in [each["name"] for each in await self._list("/v1/projects")]:
            return []
        name = urllib.parse.quote(self._project, safe="")
        return [_stored(each) for each in await self._list(f"/v1/projects/{name}/spans")]

    async def wait_spans(self, count: int, timeout_s: float = 30) -> list[StoredSpan]:
        """Return as soon as there are so many. AssertionError with what there is if never."""
        spans: list[StoredSpan] = []
        try:
            async with asyncio.timeout(timeout_s):
                while len(spans := await self.spans()) < count:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            names = sorted(span.name for span in spans)
            raise AssertionError(f"{len(spans)} spans of {count} came: {names}") from None
        return spans

    async def wait_ready(self) -> None:
        """Return when it takes spans in and answers."""
        async with asyncio.timeout(START_S):
            while True:
                assert self.process.poll() is None, self._log.read_text(errors="replace")
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(read_page, f"{self._url}/readyz")
                    return
                await asyncio.sleep(_POLL_S)

    async def _list(self, path: str) -> list[dict[str, Any]]:
        """All entries, of however many pages."""
        entries, cursor = [], None
        while True:
            query = {"limit": _PAGE} | ({"cursor": cursor} if cursor else {})
            url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
            answer = json.loads(await asyncio.to_thread(read_page, url))
            entries += answer["data"]
            cursor = answer["next_cursor"]
            if cursor is None:
                return entries


def _stored(span: dict[str, Any]) -> StoredSpan:
    return StoredSpan(
        name=span["name"],
        trace_id=span["context"]["trace_id"],
        span_id=span["context"]["span_id"],
        parent_span_id=span["parent_id"] or "",
        kind=span["span_kind"],
        start=datetime.fromisoformat(span["start_time"]),
        end=datetime.fromisoformat(span["end_time"]),
        status=span["status_code"],
        attributes=span["attributes"],
        events=span["events"],
    )


def phoenix_python() -> Path:
    """The interpreter that has Phoenix, installed on first use; skips the test if that fails."""
    return venv_python("phoenix", PACKAGE)


@contextlib.asynccontextmanager
async def running_phoenix(python: Path, project: str) -> AsyncIterator[Phoenix]:
    """On free ports, with a folder of its own; nothing of either is left at the end."""
    web_port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="phoenix-") as name:
        folder = Path(name)
        log = folder / "phoenix.log"
        with _process(python, folder, log, web_port, grpc_port) as process:
            phoenix = Phoenix(process, log, (web_port, grpc_port), project)
            await phoenix.wait_ready()
            yield phoenix


@contextlib.contextmanager
def _process(
    python: Path, folder: Path, log: Path, web_port: int, grpc_port: int
) -> Iterator[subprocess.Popen[bytes]]:
    foreign = ("OTEL_", "OUTRIDER_", "PHOENIX_", "PYTHON")
    clean = {n: value for n, value in os.environ.items() if not n.startswith(foreign)}
    own = {
        "HOME": str(folder),
        "PHOENIX_WORKING_DIR": str(folder / "data"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(web_port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", "phoenix.server.main", "serve"],
            cwd=folder,
            env=clean | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
