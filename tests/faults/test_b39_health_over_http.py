"""B39 over HTTP: compute blocks the event loop; health lies in either direction.

Right: whatever is computed, `/healthz` and `/readyz` answer within half a second, also on new
connections. When the engine behind the gateway is dead or hangs, `/readyz` turns bad within
seconds, everybody who waits gets an error, new requests get 503, and the target's own probes are
bad too; a drafter that is away changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.draft_scripts import Mute
from tests.support.gateways import gateway_on
from tests.support.http_gateway import COMPLETIONS, Broken, HttpClient, ask_once
from tests.support.http_streams import HttpStream, completion, http_front, read_all
from tests.support.in_process import Target, running_target
from tests.support.processes import running_process
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import wait_for_drafters
from tests.support.token_streams import wait_until

pytestmark = pytest.mark.timeout(60)

NOTICED_S = 5.0
STEP_TIMEOUT_S = 1.0
EVERY_S = 0.1
OFF = {"speculation": {"mode": "off"}}


class Fault:
    """What happens to every step from `break_it` on; `release` lets a lost thread end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._gate = threading.Event()

    def break_it(self, target: Target) -> None:
        """From now on."""
        if self._kind == "is lost":
            target.service.batcher._task.cancel()
        else:
            target.service.batcher._run_step = self._run

    def release(self) -> None:
        """At the end of a test."""
        self._gate.set()

    def _run(self, plan: Any) -> Any:
        if self._kind == "never returns":
            self._gate.wait(60)
        raise ArithmeticError("broken")


@pytest.mark.parametrize("kind", ["raises", "never returns", "is lost"])
async def test_a_dead_engine_says_so(kind: str, tiny_model: Path) -> None:
    """Streams end with an error and no good end, whole answers are 500, readiness turns bad at the
    gateway and at the target, new requests get 503; the gateway itself is alive."""
    fault = Fault(kind)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(capture_logs())  # a rendered traceback would block the loop here
        target = await stack.enter_async_context(
            running_target(tiny_model, admin=True, max_sequences=2, step_timeout_s=STEP_TIMEOUT_S)
        )
        stack.callback(fault.release)
        gateway = await stack.enter_async_context(
            gateway_on(tiny_model, [target.address], http_port=0)
        )
        http = await stack.enter_async_context(http_front(gateway))
        await gateway.wait_health(True)
        port = http.server.port
        bodies = [completion([5, i], 450, **OFF) for i in range(3, 9)]
        running = [await HttpStream.open(port, body) for body in bodies[:2]]
        for stream in running:
            await stream.read_first()
        waiting = [await HttpStream.open(port, body) for body in bodies[2:4]]
        whole = [await http.client() for _ in bodies[4:]]
        for client, body in zip(whole, bodies[4:], strict=True):
            await client.send("POST", COMPLETIONS, body)

        async def all_there() -> bool:
            return (await target.status()).load.started == len(bodies)

        await wait_until(all_there, 5, every_s=0.001)
        fault.break_it(target)
        broken_s = time.monotonic()
        await read_all([*running, *waiting], NOTICED_S)
        for stream in running:
            assert stream.broken
            assert stream.error["type"] == "server_error"
        for stream in waiting:
            assert stream.answer.status == 500
        for client in whole:
            answer = await client.answer()
            assert answer.status == 500
            assert answer.error["type"] == "server_error"

        async def unready() -> bool:
            return (await ask_once(port, "GET", "/readyz")).status == 503

        await wait_until(unready, NOTICED_S)
        assert time.monotonic() - broken_s < NOTICED_S
        assert (await ask_once(port, "GET", "/healthz")).status == 200
        for path in ("/healthz", "/readyz"):
            answer = await ask_once(target.admin_port, "GET", path)
            assert (answer.status, answer.body) == (503, b"dead\n")
        refused = await http.ask("POST", COMPLETIONS, completion([5, 6], 5))
        assert refused.status == 503
        assert refused.error["code"] == "unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert gateway.num_running == 0
        for stream in (*running, *waiting):
            stream.close()


async def test_readiness_does_not_depend_on_the_drafter(tiny_model: Path) -> None:
    """A drafter goes and comes back, twice; nobody who asks meanwhile hears anything but ready, and
    requests are answered."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafter.address, step_timeout_s=0.2) as target,
        gateway_on(tiny_model, [target.address], http_port=0) as gateway,
        http_front(gateway) as http,
    ):
        await gateway.wait_health(True)
        await wait_for_drafters(target)
        async with probed(http.server.port) as probe:
            for _ in range(2):
                await drafter.stop()

                async def degraded() -> bool:
                    return (await target.status()).state == "degraded"

                await wait_until(degraded, 5)
                answer = await http.ask("POST", COMPLETIONS, completion([5, 6], 5))
                assert answer.status == 200
                await drafter.start()
        assert probe.failures == []


@dataclass
class Probe:
    """Both probes each 100 ms, each second time over a new connection."""

    port: int
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        kept = await HttpClient.connect(self.port)
        try:
            while True:
                for path in ("/healthz", "/readyz"):
                    await self._check(kept, path)
                    await self._check(None, path)
        finally:
            kept.close()

    async def _check(self, kept: HttpClient | None, path: str) -> None:
        started_s = time.monotonic()
        try:
            answer = await (kept.ask("GET", path) if kept else ask_once(self.port, "GET", path))
            if answer.status != 200:
                self.failures.append(f"{path} {answer.status} {answer.body.decode()}")
        except (OSError, Broken) as error:
            self.failures.append(f"{path} {error!r}")
        self.seconds.append(time.monotonic() - started_s)
        await asyncio.sleep(EVERY_S)

    @property
    def p99_s(self) -> float:
        """The worst but one in a hundred."""
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


@contextlib.asynccontextmanager
async def probed(port: int) -> AsyncIterator[Probe]:
    """Probes that run while the block does."""
    probe = Probe(port)
    task = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def long_text(number: int, num_bytes: int) -> str:
    """Of many tokens; it shares no beginning with the others."""
    words = f"room {number} and the quick brown fox of the hill and the sea "
    return (words * (num_bytes // len(words) + 1))[:num_bytes]


async def check_long_prompts(folder: Path, log_folder: Path, count: int, num_bytes: int) -> None:
    """That many at once, beside a stream and the probes, with gateway and target as processes."""
    model = make_tiny_model(folder / "tiny", max_len=16384)
    async with (
        running_process(
            "target", log_folder, model=model, drafters="", kv_tokens=16384 * (count + 1)
        ) as target,
        running_process("gateway", log_folder, model=model, targets=target.address) as gateway,
    ):
        await gateway.wait_serving()
        port = gateway.http_port
        async with probed(port) as probe:
            short = await HttpStream.open(port, completion([5, 6], 300, **OFF))
            bodies = [completion(long_text(i, num_bytes), 4) for i in range(count)]
            streams = [await HttpStream.open(port, body) for body in bodies]
            await read_all([short, *streams], 200)
            await asyncio.sleep(3 * EVERY_S)
        for stream in (short, *streams):
            assert stream.whole, stream.error
            stream.close()
        assert all(stream.usage["prompt_tokens"] >= 7500 for stream in streams)
    assert probe.failures == []
    assert len(probe.seconds) > 5
    assert probe.p99_s < 0.5, probe.seconds


async def test_a_long_prompt_does_not_hold_up_the_probes(tmp_path: Path) -> None:
    """One of 30 kB and more than 7,500 tokens: no probe fails, and they are quick."""
    await check_long_prompts(tmp_path, tmp_path, 1, 30_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_eight_long_prompts_do_not_hold_up_the_probes(tmp_path: Path) -> None:
    """Eight of them at once."""
    await check_long_prompts(tmp_path, tmp_path, 8, 30_000)
