"""A real Prometheus beside three real services under load: every panel and rule gets an answer, and
every scrape adds up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2
from tests.support.dashboards import panel_queries, recordings
from tests.support.processes import ServiceProcess, running_process
from tests.support.prometheus import Prometheus, read_page, running_prometheus
from tests.support.scrapes import Scrape
from tests.support.sums import assert_draft_adds_up, assert_gateway_adds_up, assert_target_adds_up
from tests.support.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="Prometheus is not here: apt-get install --no-install-recommends prometheus",
    ),
]

DATA_S = 150.0
"""Until every panel has data: on a machine with nothing else to do a tenth of it."""
SCRAPE_EVERY_S = 0.2
MAX_SCRAPE_BYTES = 200_000
WINDOW = "30s"
"""What Grafana's own intervals are here."""
NO_DATA = {
    "Outrider / Capacity: Energy per 1,000 tokens: A": "not every machine tells",
}
"""Panels that may stay empty, and why."""
MODES = sampling_pb2.SpeculationParams
CHECKS: dict[str, Callable[[Scrape], None]] = {
    "gateway": assert_gateway_adds_up,
    "target": assert_target_adds_up,
    "draft": assert_draft_adds_up,
}


@dataclass(frozen=True)
class Stack:
    """A gateway, a target and two drafters, each a process."""

    gateway: ServiceProcess
    target: ServiceProcess
    drafts: tuple[ServiceProcess, ServiceProcess]

    @property
    def ports(self) -> dict[str, list[int]]:
        """Where metrics are, by job."""
        return {
            "gateway": [self.gateway.metrics_port],
            "target": [self.target.metrics_port],
            "draft": [draft.metrics_port for draft in self.drafts],
        }


@contextlib.asynccontextmanager
async def running_stack(folder: Path) -> AsyncIterator[Stack]:
    """All of them, ready, with a model that means nothing."""
    model = make_tiny_model(folder / "tiny", max_len=2048)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        drafts = (
            await enter(running_process("draft", folder)),
            await enter(running_process("draft", folder)),
        )
        addresses = ",".join(draft.address for draft in drafts)
        # A cache that is too small for all requests of the load, so that some are preempted.
        target = await enter(
            running_process("target", folder, model=model, drafters=addresses, kv_tokens=2048)
        )
        gateway = await enter(
            running_process("gateway", folder, model=model, targets=target.address)
        )
        await gateway.wait_serving()
        await target.wait_event("drafter ready")
        yield Stack(gateway, target, drafts)


def request(number: int) -> pb.GenerateRequest:
    """One of a mixed lot: with and without drafts, short and long, greedy and not."""
    drafted = number % 4 != 0
    return pb.GenerateRequest(
        text="one river runs " * (1 + number % 30),
        sampling=sampling_pb2.SamplingParams(temperature=0.7 * (number % 2), seed=number),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=20 + 40 * (number % 6),
            ignore_eos=number % 3 > 0,
            stop=["e", "th"] if number % 5 == 0 else [],
        ),
        speculation=MODES(
            mode=MODES.MODE_FIXED if drafted else MODES.MODE_OFF,
            max_draft_tokens=4 if drafted else None,
        ),
    )


async def one_client(
    stub: inference_pb2_grpc.InferenceStub, first: int, stop: asyncio.Event
) -> None:
    """Requests one after the other; some are left in the middle, some have a fault or no time."""
    number = first
    while not stop.is_set():
        number += 8
        with contextlib.suppress(grpc.aio.AioRpcError):
            if number % 7 == 3:
                await anext(aiter(stub.Generate(pb.GenerateRequest(text="x", model="no such"))))
                continue
            deadline_s = 0.02 if number % 11 == 5 else 60
            call = stub.Generate(request(number), timeout=deadline_s)
            async for response in call:
                if number % 9 == 4 and response.HasField("chunk"):
                    call.cancel()
                    break  # else it raises CancelledError, which ends this client without a word


async def watch(service: str, port: int, stop: asyncio.Event) -> str:
    """Scrape until told to stop, and check each; gives the last page."""
    before = None
    while True:
        last_one = stop.is_set()
        page = await asyncio.to_thread(read_page, f"http://127.0.0.1:{port}/metrics")
        assert len(page) < MAX_SCRAPE_BYTES
        now = Scrape(page)
        now.check_numbers(before)
        CHECKS[service](now)
        if last_one:
            return page
        before = now
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SCRAPE_EVERY_S)


async def load(address: str, stop: asyncio.Event) -> None:
    """Eight clients until told to stop."""
    async with open_channel(address) as channel, asyncio.TaskGroup() as clients:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for first in range(8):
            clients.create_task(one_client(stub, first, stop))


def for_prometheus(expr: str) -> str:
    """A panel's expression as Grafana sends it: its own variables filled in, all instances."""
    expr = re.sub(r"\$__(rate_interval|range)", WINDOW, expr)
    return re.sub(r"\$(gateway|target|draft)\b", ".*", expr)


async def empty_panels(prometheus: Prometheus) -> set[str]:
    """The places of queries without a series. What there is are plain numbers."""
    empty = set()
    for query in panel_queries():
        series = await prometheus.query(for_prometheus(query.expr))
        assert all(math.isfinite(float(each["value"][1])) for each in series), query
        if not series:
            empty.add(query.place)
    return empty - set(NO_DATA)


async def wait_for_data(prometheus: Prometheus) -> None:
    """Return when no panel is empty. AssertionError if some stay so."""
    end_s = asyncio.get_running_loop().time() + DATA_S
    while empty := await empty_panels(prometheus):
        assert asyncio.get_running_loop().time() < end_s, f"these stay empty: {empty}"
        await asyncio.sleep(1)


async def assert_rules_are_well(prometheus: Prometheus) -> None:
    """Each rule is evaluated without an error, each recording is there, and nothing fires."""
    # A rule's turn comes every half minute, and its first one may have been before there was data.
    end_s = asyncio.get_running_loop().time() + DATA_S
    while missing := [name for name in recordings() if not await prometheus.query(name)]:
        assert asyncio.get_running_loop().time() < end_s, f"these stay away: {missing}"
        await asyncio.sleep(1)
    found = await prometheus.rules()
    assert {rule["name"]: rule["lastError"] for rule in found if rule["health"] != "ok"} == {}
    alarmed = [rule["name"] for rule in found if rule.get("state", "inactive") == "firing"]
    assert alarmed == []


def promtool_says(page: str) -> str:
    """What `promtool check metrics` has against a scrape; nothing if it is clean."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=30
    )
    return done.stdout + done.stderr


async def test_everything_that_is_drawn_or_watched_has_data(tmp_path: Path) -> None:
    """Under a mixed load, with clients that leave, bad requests and deadlines: each scrape of each
    service is small and adds up, promtool finds nothing wrong with its names, Prometheus reads all
    of them, and then each panel and each rule has an answer."""
    async with (
        running_stack(tmp_path) as stack,
        running_prometheus(tmp_path, stack.ports) as prometheus,
    ):
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            watchers = [
                tasks.create_task(watch(service, port, stop))
                for service, ports in stack.ports.items()
                for port in ports
            ]
            tasks.create_task(load(stack.gateway.address, stop))
            await wait_for_data(prometheus)
            await assert_rules_are_well(prometheus)
            stop.set()
        for watcher in watchers:
            assert promtool_says(watcher.result()) == ""
        scraped = await prometheus.targets()
        assert len(scraped) == 4
        assert {each["health"] for each in scraped} == {"up"}
