"""A real Prometheus with the repository's own configuration, pointed at services on loopback ports.

async with running_prometheus(tmp_path, {"target": [9465]}) as prometheus:
    await prometheus.query('up{job="target"}')
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from outrider.cli.demo import free_ports
from tests.support.dashboards import PROMETHEUS

_START_S = 30.0
_POLL_S = 0.1
_INTERVAL = "2s"


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """What the expression is now: one entry a series. AssertionError for a wrong one."""
        answer = await self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
        return answer["result"]

    async def rules(self) -> list[dict[str, Any]]:
        """All rules with their health and, for alerts, their state."""
        groups = (await self._get("/api/v1/rules"))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def targets(self) -> list[dict[str, Any]]:
        """What it scrapes, and how the last scrape of each went."""
        return (await self._get("/api/v1/targets"))["activeTargets"]

    async def wait_ready(self) -> None:
        """Return when it takes queries."""
        async with asyncio.timeout(_START_S):
            while True:
                assert self._process.poll() is None, self._log.read_text()
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(read_page, f"{self._url}/-/ready")
                    return
                await asyncio.sleep(_POLL_S)

    async def _get(self, path: str) -> dict[str, Any]:
        text = await asyncio.to_thread(read_page, self._url + path)
        return json.loads(text)["data"]


def read_page(url: str) -> str:
    """A page's text; an answer that is not 2xx is an OSError that says what it said."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error.code}: {error.read().decode()}") from error


@contextlib.asynccontextmanager
async def running_prometheus(
    folder: Path, ports: Mapping[str, Sequence[int]]
) -> AsyncIterator[Prometheus]:
    """Scrapes these ports every two seconds, under the names of the jobs; gone at the end."""
    _write_configuration(folder, ports)
    (port,) = free_ports(1)
    log = folder / "prometheus.log"
    with _process(folder, port, log) as process:
        prometheus = Prometheus(port, process, log)
        await prometheus.wait_ready()
        yield prometheus


@contextlib.contextmanager
def _process(folder: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'series'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _write_configuration(folder: Path, ports: Mapping[str, Sequence[int]]) -> None:
    """The repository's files with other addresses, and in a hurry."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": _INTERVAL,
        "scrape_timeout": _INTERVAL,
        "evaluation_interval": _INTERVAL,
    }
    assert {job["job_name"] for job in config["scrape_configs"]} == set(ports)
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        addresses = [f"127.0.0.1:{port}" for port in ports[job["job_name"]]]
        job["static_configs"] = [{"targets": addresses}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for name in config["rule_files"]:
        rules = yaml.safe_load((PROMETHEUS / name).read_text())
        for group in rules["groups"]:
            group["interval"] = _INTERVAL
        (folder / name).write_text(yaml.safe_dump(rules))
