"""Streams of tokens as a client of the target sees them, with the times at which tokens came.

Also the one seam of the tests that need slow steps: `slow_steps` wraps what the batcher runs on its
device thread, so that a tiny model takes as long as a real one while the cores stay free; and what
it tells the drafters of waits in vain, so that they can be counted whatever the machine's clock
says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc
from tests.support.in_process import Target

OFF = sampling_pb2.SpeculationParams(mode=sampling_pb2.SpeculationParams.MODE_OFF)
AUTO = sampling_pb2.SpeculationParams(mode=sampling_pb2.SpeculationParams.MODE_AUTO)


def fixed(k: int) -> sampling_pb2.SpeculationParams:
    """Exactly k drafts a round, waited for."""
    return sampling_pb2.SpeculationParams(
        mode=sampling_pb2.SpeculationParams.MODE_FIXED, max_draft_tokens=k
    )


def greedy(
    prompt: Sequence[int],
    max_tokens: int,
    speculation: sampling_pb2.SpeculationParams | None = None,
) -> target_pb2.TokenRequest:
    """A greedy request that ends at its cap and nowhere else."""
    return target_pb2.TokenRequest(
        token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        speculation=speculation or AUTO,
    )


@dataclass
class StepClock:
    """What steps took and how often they waited for a drafter to the end of their patience."""

    longest_s: float = 0.0
    vain_waits: set[int] = field(default_factory=set)
    """Numbers of the steps before which somebody waited in vain."""


def slow_steps(target: Target, step_s: float) -> StepClock:
    """From now on each step of `target` takes at least `step_s`."""
    clock = StepClock()
    batcher = target.service.batcher
    hub = target.service._hub
    run_step, note_vain_wait = batcher._run_step, hub.note_vain_wait

    def run_slowly(plan: Any) -> Any:
        started = time.monotonic()
        verdicts = run_step(plan)
        time.sleep(max(0.0, step_s - (time.monotonic() - started)))
        clock.longest_s = max(clock.longest_s, time.monotonic() - started)
        return verdicts

    def count_vain_wait(*arguments: Any) -> None:
        clock.vain_waits.add(batcher.totals.steps)
        note_vain_wait(*arguments)

    batcher._run_step, hub.note_vain_wait = run_slowly, count_vain_wait
    return clock


@dataclass
class TimedStream:
    """One request. `run` reads it; others look on while it runs."""

    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, tokens so far, drafted ones among those that came then)"""
    finish: target_pb2.TokenFinish | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(
        self, stub: target_pb2_grpc.TargetStub, request: target_pb2.TokenRequest, timeout_s: float
    ) -> None:
        """Read to the end. No token may be missing or doubled, nothing may follow the end."""
        async for chunk in stub.Generate(request, timeout=timeout_s):
            assert self.finish is None, "a chunk after the end"
            assert chunk.first_index == len(self.ids), "a gap or a repeat"
            self.ids.extend(token.id for token in chunk.tokens)
            drafted = sum(token.drafted for token in chunk.tokens)
            self.arrivals.append((time.monotonic(), len(self.ids), drafted))
            if chunk.HasField("finish"):
                self.finish = chunk.finish
            self._changed.set()
        assert self.finish is not None, "a stream without an end"
        assert self.finish.usage.completion_tokens == len(self.ids)

    async def wait_tokens(self, count: int) -> None:
        """Return once that many tokens are here, or the stream has ended."""
        while len(self.ids) < count and self.finish is None:
            self._changed.clear()
            await self._changed.wait()

    def gaps_after(self, moment_s: float) -> list[float]:
        """Seconds between consecutive arrivals, of those that end after `moment_s`."""
        times = [each[0] for each in self.arrivals]
        pairs = zip(times, times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > moment_s]

    def num_drafted_after(self, moment_s: float) -> int:
        """Accepted drafts that came after `moment_s`."""
        return sum(drafted for when, _, drafted in self.arrivals if when > moment_s)

    def tokens_per_s(self, since_s: float) -> float:
        """Speed from `since_s` to the last token."""
        before = max((count for when, count, _ in self.arrivals if when <= since_s), default=0)
        last_s, count, _ = self.arrivals[-1]
        return (count - before) / (last_s - since_s)


async def wait_until(
    condition: Callable[[], Awaitable[bool]], timeout_s: float, every_s: float = 0.02
) -> None:
    """Return once the condition holds; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(every_s)


async def quiet_status(
    target: Target, timeout_s: float = 2.0
) -> target_pb2.TargetGetStatusResponse:
    """The status once nothing runs, waits or holds a block; TimeoutError if that takes longer."""
    status = await target.status()

    async def quiet() -> bool:
        nonlocal status
        status = await target.status()
        busy = status.load.running or status.load.waiting or status.pool.used
        return not busy

    await wait_until(quiet, timeout_s)
    return status


def assert_counts_balance(status: target_pb2.TargetGetStatusResponse) -> None:
    """Each request has exactly one end; each proposed token has exactly one fate."""
    load, drafts = status.load, status.speculation
    ended = load.finished + load.failed + load.cancelled
    assert load.started == ended + load.running + load.waiting
    assert status.pool.total == status.pool.free + status.pool.used
    assert list(status.pool.integrity_errors) == []
    if not load.running and not load.waiting:
        assert drafts.proposed == drafts.drafted + sum(drafts.unused.values())
