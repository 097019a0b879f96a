"""Continuous batching with a paged cache against batches that wait for their longest member.

The same engine, model, requests and number of places; one process, runs in turn. Static batches
come in two forms: `padded` as a plain `generate` over a batch does it, where the batch is one
rectangle that is computed to the end of its longest text; and `trimmed`, the best that can be said
for it, where a finished text costs no more compute and its cache is reserved up to its own cap
only. Prints a table and a JSON line.

    python -m bench.static_batching --pairs 5
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field

from outrider.engine.numerics import prepare_cpu
from outrider.serving.cores import usable_cores

THREADS = usable_cores()
prepare_cpu(THREADS)  # before anything imports torch

from bench.engine_loop import EngineLoop, Job  # noqa: E402
from outrider.engine.block_pool import BLOCK_SIZE  # noqa: E402
from outrider.engine.model import LlamaModel  # noqa: E402
from outrider.engine.runner import Runner  # noqa: E402
from outrider.models.resolve import resolve  # noqa: E402
from target_service.request import Request  # noqa: E402

PLACES = 16
STEP_TOKENS = 512


@dataclass
class Result:
    """One run over all requests."""

    seconds: float
    num_tokens: int
    waste: list[float] = field(default_factory=list)
    """Per step, the share of reserved slots that hold no token."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included in the time."""
        return self.num_tokens / self.seconds


class Bench:
    """A model, and the same requests again and again."""

    def __init__(self, model: str, num_requests: int) -> None:
        runner = Runner(LlamaModel.load(resolve(model)), 1024, BLOCK_SIZE)
        self.loop = EngineLoop(runner, num_requests)
        rng = random.Random(0)
        # Most texts are short and a few are long, as in service.
        self.jobs: list[Job] = [
            (
                [rng.randrange(10, 40_000) for _ in range(rng.randrange(8, 120))],
                min(160, int(8 * 1.35 ** rng.uniform(0, 11))),
            )
            for _ in range(num_requests)
        ]

    def continuous(self) -> Result:
        """A place that becomes free is taken at the next step."""
        return self._run([self.loop.admit(self.jobs)], None)

    def trimmed(self) -> Result:
        """Batches of PLACES in order of arrival, each to its end."""
        batches = [self.loop.admit(jobs) for jobs in self._batches()]
        return self._run(batches, [sum(request.max_len for request in batch) for batch in batches])

    def padded(self) -> Result:
        """The same, but each text goes on to the longest cap of its batch, for nothing."""
        batches, reserved = [], []
        for jobs in self._batches():
            longest = max(cap for _, cap in jobs)
            batches.append(self.loop.admit([(prompt, longest) for prompt, _ in jobs]))
            reserved.append(len(jobs) * (max(len(prompt) for prompt, _ in jobs) + longest))
        result = self._run(batches, reserved)
        result.num_tokens = sum(cap for _, cap in self.jobs)
        return result

    def _batches(self) -> list[list[Job]]:
        return [self.jobs[i : i + PLACES] for i in range(0, len(self.jobs), PLACES)]

    def _run(self, batches: list[list[Request]], reserved: list[int] | None) -> Result:
        """All batches in turn; `reserved` cache slots each, or what the pool really gave."""
        result = Result(0.0, 0)
        started = time.perf_counter()
        for i, batch in enumerate(batches):
            scheduler = self.loop.scheduler(batch, PLACES, STEP_TOKENS)
            while scheduler.running or scheduler.waiting:
                result.num_tokens += self.loop.step(scheduler)
                held = sum(request.sequence.num_computed for request in scheduler.running)
                slots = reserved[i] if reserved else scheduler.pool.num_used * BLOCK_SIZE
                if slots:
                    result.waste.append(1 - held / slots)
        result.seconds = time.perf_counter() - started
        return result


def main() -> None:
    """Run pairs and report ratios with their spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    bench = Bench(args.model, args.requests)
    forms = {"continuous": bench.continuous, "trimmed": bench.trimmed, "padded": bench.padded}
    bench.continuous()  # warm
    print("tokens/s: continuous   trimmed    padded   ratio to trimmed   ratio to padded")
    rounds = []
    for _ in range(args.pairs):
        each = {name: run() for name, run in forms.items()}
        rounds.append(each)
        ours, trimmed, padded = (each[name].tokens_per_s for name in forms)
        print(
            f"{ours:20.1f}{trimmed:10.1f}{padded:10.1f}{ours / trimmed:19.2f}{ours / padded:18.2f}",
            flush=True,
        )
    report: dict[str, object] = {
        "requests": args.requests,
        "tokens": rounds[0]["continuous"].num_tokens,
        "waste": {name: round(statistics.mean(rounds[0][name].waste), 3) for name in forms},
    }
    for name in ("trimmed", "padded"):
        ratios = [each["continuous"].tokens_per_s / each[name].tokens_per_s for each in rounds]
        report[f"ratio_to_{name}"] = {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
