"""What the gateway adds to a token's way: milliseconds to the first token and to every later one.

A target without a model sends 20 tokens a second to each of 32 streams. The same clients read them
from the target itself, through the gateway over gRPC, and over HTTP, in turn. Target, gateway and
clients are processes of their own that share one clock, so each token's way is timed by itself; the
target's own time counts for nobody. `added` is what is above the median of the target itself, also
at the 99th percentile: more than the gateway's share, since the rest of the way has its tail too.
Prints a table and a JSON line.

    python -m bench.gateway_overhead --seconds 10 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvloop

from bench.paced_stack import PacedStack, paced_stack
from bench.stream_clients import (
    Arrivals,
    GrpcClient,
    HttpClient,
    StreamClient,
    TargetClient,
    read,
)

SHORTEST, LONGEST = 20, 60  # tokens of an answer
GOAL_P99_MS = 3.0

_request_ids = itertools.count()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass
class Way:
    """The times of one way to the tokens, in ms."""

    first: list[float] = field(default_factory=list)
    """From asking to the first token, without the target's own time."""
    chunk: list[float] = field(default_factory=list)
    """From the target's writing to the client's reading, of every later token."""
    gateway_cpu_s: float = 0.0
    seconds: float = 0.0

    def add(self, arrivals: Arrivals, received_ns: int, sent_ns: Sequence[int]) -> None:
        """One stream. Raises ValueError if its pieces are not the target's tokens."""
        arrived = arrivals.arrived_ns
        ways = [(a - s) / 1e6 for a, s in zip(arrived, sent_ns, strict=True)]
        self.first.append((received_ns - arrivals.begun_ns) / 1e6 + ways[0])
        self.chunk += ways[1:]

    def figures(self) -> dict[str, float]:
        """For a table."""
        return {
            f"{name}_p{percent}": percentile(values, percent)
            for name, values in (("first", self.first), ("chunk", self.chunk))
            for percent in (50, 99)
        }


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Its pauses are not the gateway's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def measure(
    way: Way, stack: PacedStack, connect: Callable[[], StreamClient], streams: int, seconds: float
) -> None:
    """Keep so many streams going for so long, one after the other in each of the clients."""
    clients = [connect() for _ in range(streams)]
    begun, cpu_s = time.monotonic(), stack.cpu_s
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_keep_asking(client, begun + seconds, random.Random(seed)))
                for seed, client in enumerate(clients)
            ]
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    way.seconds += time.monotonic() - begun
    way.gateway_cpu_s += stack.cpu_s - cpu_s
    noted = stack.noted()
    for arrivals in itertools.chain.from_iterable(task.result() for task in tasks):
        way.add(arrivals, *noted[arrivals.request_id])


async def _keep_asking(client: StreamClient, until: float, rng: random.Random) -> list[Arrivals]:
    await asyncio.sleep(rng.uniform(0.0, 1.0))  # nobody comes in step
    answers = []
    while time.monotonic() < until:
        request_id = f"measured-{next(_request_ids)}"
        answers.append(await read(client, request_id, rng.randint(SHORTEST, LONGEST)))
    return answers[1:]  # the first one has connected


def print_table(ways: dict[str, Way]) -> dict[str, dict[str, float]]:
    """Times of each way, and what the gateway adds; gives them back."""
    figures = {name: way.figures() for name, way in ways.items()}
    base = figures["target"]
    for name in [name for name in ways if name != "target"]:
        figures[f"added by {name}"] = {
            key: figures[name][key] - base[f"{key.partition('_')[0]}_p50"] for key in base
        }
    print(f"{'ms':16}{'first p50':>10}{'p99':>8}{'later p50':>11}{'p99':>8}{'CPU us/chunk':>14}")
    for name, row in figures.items():
        cells = f"{row['first_p50']:10.2f}{row['first_p99']:8.2f}"
        cells += f"{row['chunk_p50']:11.2f}{row['chunk_p99']:8.2f}"
        if name in ways and name != "target":
            way = ways[name]
            row["cpu_us_per_chunk"] = way.gateway_cpu_s * 1e6 / (len(way.chunk) + len(way.first))
            cells += f"{row['cpu_us_per_chunk']:14.0f}"
        print(f"{name:16}{cells}")
    return figures


async def run(stack: PacedStack, streams: int, seconds: float, rounds: int) -> dict[str, Way]:
    """All ways in turn, so that a drift of the machine favours nobody."""
    connects: dict[str, Callable[[], StreamClient]] = {
        "target": lambda: TargetClient(stack.target),
        "gRPC": lambda: GrpcClient(stack.grpc),
        "HTTP": lambda: HttpClient(stack.http, stack.model),
    }
    for connect in connects.values():  # warm
        await measure(Way(), stack, connect, streams, 1.0)
    ways = {name: Way() for name in connects}
    with without_gc():
        for _ in range(rounds):
            for name, connect in connects.items():
                await measure(ways[name], stack, connect, streams, seconds)
    return ways


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval-ms", type=float, default=50.0)
    args = parser.parse_args()
    with paced_stack(args.model, interval_ms=args.interval_ms) as stack:
        ways = uvloop.run(run(stack, args.streams, args.seconds, args.rounds))
    figures = print_table(ways)
    rounded = {
        name: {key: round(value, 3) for key, value in row.items()} for name, row in figures.items()
    }
    print(json.dumps({"streams": args.streams, "ms": rounded, "goal_p99_ms": GOAL_P99_MS}))


if __name__ == "__main__":
    main()
