"""How much of a target's step is not the model: planning, choosing, committing, writing streams.

    python -m bench.step_shares --dtype int8

A real target in this process, asked over gRPC from another one, without drafts. A step's period is
from one forward's begin to the next one's; what the forward leaves of it is everybody else's, be it
work or waiting for the processor. What happens beside the forward lengthens no step, and so does
not count. The last line is one JSON object, by number of streams: shares of the period. "named" are
planning, choosing, committing and writing streams; "all" is all that is not the forward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

STREAMS = (1, 32)
PROMPT_TOKENS = 96
TOKENS = 120
_HOST = "127.0.0.1"
_SHARES = ("named", "all")


class StepTimer:
    """Seconds of each part of a target's steps, taken between whole steps of so many sequences."""

    def __init__(self, batcher: Any) -> None:
        """Puts itself around the parts of a batcher and of the verifier that it runs."""
        self.num_sequences = 0
        """Steps of another number, or with a prompt, are left out."""
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = defaultdict(float)
        self._began = 0.0
        self._is_whole = False
        verifier = batcher._run_step.__self__
        self._runner = verifier._runner
        batcher._run_step = self._timed("thread", self._marked(verifier.run))
        batcher._run = self._timed_await("run", batcher._run)
        batcher._commit = self._timed("commit", batcher._commit)
        batcher.scheduler.plan = self._timed("plan", batcher.scheduler.plan)
        batcher._gate.wait = self._timed_await("gate", batcher._gate.wait)
        self._runner.forward = self._timed("runner", self._runner.forward)
        self._runner.model.forward = self._timed("forward", self._runner.model.forward)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._current[part] += time.perf_counter() - began

        return timed

    def _timed_await(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*arguments, **named)
            finally:
                self._current[part] += time.perf_counter() - began

        return timed

    def _marked(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step begins: the one before is over."""

        def marked(plan: Any) -> Any:
            now = time.perf_counter()
            if self._is_whole:
                self._current["period"] = now - self._began
                self.steps.append(dict(self._current))
            self._current.clear()
            self._began = now
            sizes = [len(item.token_ids) for item in plan.batch.items]
            self._is_whole = sizes == [1] * self.num_sequences
            return run(plan)

        return marked

    def parts(self) -> dict[str, float]:
        """Milliseconds of a step by part, and shares of its period; medians."""
        steps = self.steps[len(self.steps) // 10 :]
        if not steps:
            raise RuntimeError(f"no two steps in a row had all {self.num_sequences} streams")

        def median(of: Callable[[dict[str, float]], float]) -> float:
            values = sorted(of(step) for step in steps)
            return 1000 * values[len(values) // 2]

        def streams(step: dict[str, float]) -> float:
            inside = step["run"] + step["plan"] + step["commit"] + step["gate"]
            return step["period"] - inside

        def named(step: dict[str, float]) -> float:
            chosen = step["thread"] - step["runner"]
            return step["plan"] + chosen + step["commit"] + streams(step)

        return {
            "period": median(lambda s: s["period"]),
            "forward": median(lambda s: s["forward"]),
            "input": median(lambda s: s["runner"] - s["forward"]),
            "choose": median(lambda s: s["thread"] - s["runner"]),
            "to and from the thread": median(lambda s: s["run"] - s["thread"]),
            "plan": median(lambda s: s["plan"]),
            "commit": median(lambda s: s["commit"]),
            "streams and the rest": median(streams),
            "named": median(lambda s: named(s) / s["period"]) / 1000,
            "all": median(lambda s: 1 - s["forward"] / s["period"]) / 1000,
        }


async def measure(
    model: str, dtype: str, threads: int, num_tokens: int
) -> dict[str, dict[str, float]]:
    """The parts of a step by number of streams, of one target; each stream has so many tokens."""
    from outrider.serving.logs import configure_logging
    from outrider.serving.server import listening
    from outrider.serving.settings import TargetSettings
    from target_service.service import TargetService

    configure_logging("target", "warning")
    settings = TargetSettings(port=0, model=model, dtype=dtype, threads=threads, drafters="")
    service = TargetService(settings)
    found = {}
    async with listening(service, _HOST, 0) as server:
        timer = StepTimer(service.batcher)
        for num_streams in STREAMS:
            timer.num_sequences, timer.steps = num_streams, []
            asker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.step_shares"),
                *("--ask", f"{_HOST}:{server.port}", "--streams", str(num_streams)),
                *("--tokens", str(num_tokens)),
            )
            if await asker.wait():
                raise RuntimeError("the asking process failed")
            found[str(num_streams)] = timer.parts()
    return found


async def ask(address: str, num_streams: int, num_tokens: int) -> None:
    """Read so many greedy answers at once, of so many tokens."""
    from outrider.serving.channel import open_channel
    from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc

    async def read(index: int) -> None:
        async with open_channel(address) as channel:
            request = target_pb2.TokenRequest(
                token_ids=range(100 + index, 100 + index + PROMPT_TOKENS),
                sampling=sampling_pb2.SamplingParams(temperature=0.0),
                stopping=sampling_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            )
            async for _ in target_pb2_grpc.TargetStub(channel).Generate(request):
                pass

    await asyncio.gather(*(read(index) for index in range(num_streams)))


def step_shares(
    model: str = "smollm2-135m-instruct",
    dtype: str = "int8",
    threads: int = 2,
    num_tokens: int = TOKENS,
) -> dict[str, dict[str, float]]:
    """Shares of a step by number of streams: "named" parts and "all" but the model's forward."""
    found = uvloop.run(measure(model, dtype, threads, num_tokens))
    for streams, parts in found.items():
        times = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items() if part not in _SHARES)
        print(f"{streams} streams, ms a step: {times}", flush=True)
    return {
        streams: {share: round(parts[share], 4) for share in _SHARES}
        for streams, parts in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the parts and the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a stream")
    parser.add_argument("--ask", help="of the process that asks: the address")
    parser.add_argument("--streams", type=int, default=1, help="of the process that asks")
    options = parser.parse_args(arguments)
    if options.ask:
        uvloop.run(ask(options.ask, options.streams, options.tokens))
    else:
        shares = step_shares(options.model, options.dtype, options.threads, options.tokens)
        print(json.dumps(shares))


if __name__ == "__main__":
    main()
