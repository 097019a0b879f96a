"""Continuous batching with a paged cache against batches that wait for their longest member.

The same engine, model, requests and number of places; one process, runs in turn. The static side
is generous: a finished text is not computed any further, only its place stays empty until the whole
batch is done, and its cache is reserved up to its own cap. Prints a table and a JSON line.

    python -m bench.static_batching --pairs 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field

from outrider.engine.numerics import prepare_cpu

THREADS = os.cpu_count() or 1
prepare_cpu(THREADS)  # before anything imports torch

from outrider.engine.block_pool import BlockPool  # noqa: E402
from outrider.engine.model import LlamaModel  # noqa: E402
from outrider.engine.runner import Runner  # noqa: E402
from outrider.models.resolve import resolve  # noqa: E402
from protos.outrider.v1 import sampling_pb2, target_pb2  # noqa: E402
from target_service.admission import Door, Limits  # noqa: E402
from target_service.draft_tail import DraftTotals  # noqa: E402
from target_service.request import Piece, Request  # noqa: E402
from target_service.scheduler import Scheduler  # noqa: E402
from target_service.verifier import Failure, Verifier  # noqa: E402
from target_service.window import StepCost  # noqa: E402

BLOCK_SIZE = 16
PLACES = 16
STEP_TOKENS = 512


@dataclass
class Sink:
    """Takes tokens and forgets them."""

    full: bool = False

    def put(self, piece: Piece) -> None:
        """Nothing to do."""

    def fail(self, error: Exception) -> None:
        """A run with an error is no measurement."""
        raise error


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
        self.runner = Runner(LlamaModel.load(resolve(model)), 1024, BLOCK_SIZE)
        config = self.runner.model.config
        limits = Limits(config.max_model_len, BLOCK_SIZE, num_requests, 0, 0, 0.0)
        self.door = Door(config, limits, StepCost(), DraftTotals())
        self.verifier = Verifier(self.runner)
        rng = random.Random(0)
        # Most texts are short and a few are long, as in service.
        self.jobs = [
            (
                [rng.randrange(10, 40_000) for _ in range(rng.randrange(8, 120))],
                min(160, int(8 * 1.35 ** rng.uniform(0, 11))),
            )
            for _ in range(num_requests)
        ]

    def requests(self) -> list[Request]:
        """Fresh ones; greedy, each to its own cap."""
        made = []
        for prompt, max_tokens in self.jobs:
            message = target_pb2.TokenRequest(
                token_ids=prompt,
                sampling=sampling_pb2.SamplingParams(temperature=0.0),
                stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
                speculation=sampling_pb2.SpeculationParams(
                    mode=sampling_pb2.SpeculationParams.MODE_OFF
                ),
            )
            made += self.door.admit(message, self.door.check(message), Sink())
        return made

    def continuous(self) -> Result:
        """A place that becomes free is taken at the next step."""
        return self._run([self.requests()], reserve=False)

    def static(self) -> Result:
        """Batches of PLACES in order of arrival, each to its end."""
        requests = self.requests()
        batches = [requests[i : i + PLACES] for i in range(0, len(requests), PLACES)]
        return self._run(batches, reserve=True)

    def _run(self, batches: list[list[Request]], *, reserve: bool) -> Result:
        result = Result(0.0, 0)
        started = time.perf_counter()
        for batch in batches:
            scheduler = Scheduler(
                BlockPool(1024, BLOCK_SIZE),
                max_sequences=PLACES,
                step_tokens=STEP_TOKENS,
                max_waiting=len(batch),
                prefix_cache=False,
            )
            for request in batch:
                scheduler.add(request)
            reserved = sum(request.max_len for request in batch)
            while scheduler.running or scheduler.waiting:
                self._step(scheduler, result)
                held = sum(request.sequence.num_computed for request in scheduler.running)
                slots = reserved if reserve else scheduler.pool.num_used * BLOCK_SIZE
                if slots:
                    result.waste.append(1 - held / slots)
        result.seconds = time.perf_counter() - started
        return result

    def _step(self, scheduler: Scheduler, result: Result) -> None:
        plan = scheduler.plan(lambda request: [])
        outcomes = self.verifier.run(plan)
        for share, item, outcome in zip(plan.shares, plan.batch.items, outcomes, strict=True):
            sequence = share.request.sequence
            if outcome is None:
                scheduler.commit(share.request, item.end)
                continue
            assert not isinstance(outcome, Failure), outcome
            sequence.token_ids.extend(outcome.tokens)
            result.num_tokens += len(outcome.tokens)
            scheduler.commit(share.request, sequence.num_tokens - 1)
            if sequence.num_tokens >= share.request.max_len:
                scheduler.remove(share.request)


def main() -> None:
    """Run pairs and report ratios with their spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    bench = Bench(args.model, args.requests)
    bench.continuous()  # warm
    pairs = [(bench.continuous(), bench.static()) for _ in range(args.pairs)]
    print("continuous tokens/s   static tokens/s   ratio   waste continuous   waste static")
    for ours, theirs in pairs:
        print(
            f"{ours.tokens_per_s:19.1f}{theirs.tokens_per_s:18.1f}"
            f"{ours.tokens_per_s / theirs.tokens_per_s:8.2f}"
            f"{statistics.mean(ours.waste):19.1%}{statistics.mean(theirs.waste):15.1%}"
        )
    ratios = sorted(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
    print(
        json.dumps(
            {
                "requests": args.requests,
                "tokens": pairs[0][0].num_tokens,
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(ratios[0], 3),
                "ratio_max": round(ratios[-1], 3),
                "waste_continuous": round(statistics.mean(pairs[0][0].waste), 3),
                "waste_static": round(statistics.mean(pairs[0][1].waste), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
