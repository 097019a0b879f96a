"""What idle streams cost the gateway: its memory, and the time of the tokens that do come.

500 clients, each with a connection of its own, get one token and then none. Resident memory of the
gateway is read before they come, while they wait and after they have left; while they wait, 32 busy
streams are timed as in `gateway_overhead.py`. Over gRPC, then over HTTP, in a gateway of its own
each. Prints a table and a JSON line.

    python -m bench.idle_streams --idle 500
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import uvloop

from bench.gateway_overhead import Way, measure, percentile, without_gc
from bench.paced_stack import PacedStack, paced_stack
from bench.paced_target import IDLE
from bench.stream_clients import GrpcClient, HttpClient, StreamClient, TargetClient

GOAL_MB = 150.0
BUSY = 32
_SETTLE_S = 2.0
_AT_ONCE = 50
"""Clients that connect at a time."""


@dataclass
class Cost:
    """What one door's idle streams cost."""

    before_mb: float
    waiting_mb: float = 0.0
    after_mb: float = 0.0
    busy: Way = field(default_factory=Way)
    busy_alone: Way = field(default_factory=Way)
    target: Way = field(default_factory=Way)
    """The same busy streams of the target itself."""

    def figures(self) -> dict[str, float]:
        """MB, and what is `added` to later tokens at the 99th percentile, in ms."""
        base = percentile(self.target.chunk, 50)
        return {
            "before_mb": self.before_mb,
            "waiting_mb": self.waiting_mb,
            "after_mb": self.after_mb,
            "added_p99_ms": percentile(self.busy.chunk, 99) - base,
            "added_p99_alone_ms": percentile(self.busy_alone.chunk, 99) - base,
        }


@contextlib.asynccontextmanager
async def idle(connect: Callable[[], StreamClient], count: int) -> AsyncIterator[None]:
    """So many streams that have their first token and wait for the next."""
    clients = [connect() for _ in range(count)]
    limit = asyncio.Semaphore(_AT_ONCE)
    open_streams: list[AsyncIterator[None]] = []

    async def begin(number: int, client: StreamClient) -> None:
        async with limit:
            pieces = client.pieces(f"{IDLE}-{number}", 1000)
            await anext(pieces)
            open_streams.append(pieces)

    try:
        await asyncio.gather(*(begin(number, client) for number, client in enumerate(clients)))
        yield
    finally:
        for pieces in open_streams:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        await asyncio.gather(*(client.close() for client in clients))


async def cost_of(
    stack: PacedStack, connect: Callable[[], StreamClient], count: int, seconds: float
) -> Cost:
    """Of this door's idle streams."""
    await measure(Way(), stack, connect, BUSY, 1.0)  # warm
    cost = Cost(stack.rss_mb)
    with without_gc():
        await measure(cost.target, stack, lambda: TargetClient(stack.target), BUSY, seconds)
        await measure(cost.busy_alone, stack, connect, BUSY, seconds)
        async with idle(connect, count):
            await measure(cost.busy, stack, connect, BUSY, seconds)
            cost.waiting_mb = stack.rss_mb
    await asyncio.sleep(_SETTLE_S)
    cost.after_mb = stack.rss_mb
    return cost


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--idle", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of busy streams")
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for door in ("gRPC", "HTTP"):
        with paced_stack(args.model, max_concurrent=args.idle + BUSY) as stack:

            def connect(door: str = door, stack: PacedStack = stack) -> StreamClient:
                if door == "gRPC":
                    return GrpcClient(stack.grpc)
                return HttpClient(stack.http, stack.model)

            rows[door] = uvloop.run(cost_of(stack, connect, args.idle, args.seconds)).figures()
    print(f"{'':6}{'before':>9}{'waiting':>9}{'after':>9} MB{'added p99':>12}{'alone':>9} ms")
    for door, row in rows.items():
        cells = "".join(f"{row[key]:9.1f}" for key in ("before_mb", "waiting_mb", "after_mb"))
        print(f"{door:6}{cells}   {row['added_p99_ms']:12.2f}{row['added_p99_alone_ms']:9.2f}")
    rounded = {
        door: {key: round(value, 3) for key, value in row.items()} for door, row in rows.items()
    }
    print(json.dumps({"idle": args.idle, "doors": rounded, "goal_mb": GOAL_MB}))


if __name__ == "__main__":
    main()
