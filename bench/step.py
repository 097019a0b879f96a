"""A step of the model alone: milliseconds by precision and rows, beside what memory allows.

    python -m bench.step --dtypes int8,bfloat16 --rounds 15

1 to 8 rows are one sequence that verifies so many drafts but one; 16 and 32 rows are as many
sequences with a token each. Every sequence has 256 tokens behind its last row, in blocks that lie
in random places. Each round takes all kinds of steps in turn, and before each precision reads as
many bytes as its matrices have with `torch.sum`, on as many threads: that is the floor. Ratios are
of one round, with a 95 % interval over the rounds. The last line is JSON; its `other_cores` says
what other processes computed meanwhile: much above 0, it is no measurement. Its `shares` are
bench.step_shares's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.busy import Bystanders
from bench.ratios import ratio_of
from bench.step_shares import step_shares
from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.numerics import prepare_cpu
from outrider.models.resolve import resolve
from outrider.serving.cores import usable_cores

if TYPE_CHECKING:
    import torch

    from outrider.engine.runner import Runner

ONE_SEQUENCE = (1, 2, 5, 8)
MANY_SEQUENCES = (16, 32)
CONTEXT = 256
SHORT_NAMES = {"bfloat16": "bf16"}
SHARES_OF = "int8"
"""The precision whose steps in a real target are looked into, too: see bench.step_shares."""
READS = 3
STEPS = 3
"""Of one kind in a row; the first of them finds nothing in the caches that is its own."""


def batch_of(rows: int, context: int, tables: Sequence[Sequence[int]]) -> Batch:
    """A step with so many rows; `tables` are blocks, one list a sequence."""
    if rows in ONE_SEQUENCE:
        return Batch([BatchItem([7] * rows, context - rows, list(tables[0]), rows)])
    return Batch([BatchItem([7], context - 1, list(table), 1) for table in tables[:rows]])


def shortest_s(work: Callable[[], object], repeats: int) -> float:
    """The least of several, in seconds."""
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least


@dataclass
class Steps:
    """One precision: a model, and what was measured of it."""

    runner: Runner
    memory: torch.Tensor
    """As many bytes as its matrices have."""
    batches: dict[int, Batch]
    """By rows; 1 is among them."""
    read_s: list[float] = field(default_factory=list)
    step_s: dict[int, list[float]] = field(default_factory=dict)

    def round(self) -> None:
        """One value of each kind."""
        self.read_s.append(shortest_s(self.memory.sum, READS))
        for rows, batch in self.batches.items():
            seconds = shortest_s(partial(self.runner.forward, batch), STEPS)
            self.step_s.setdefault(rows, []).append(seconds)

    @property
    def read_gb_s(self) -> list[float]:
        """Gigabytes a second of each round."""
        return [self.memory.nbytes / seconds / 1e9 for seconds in self.read_s]

    def report(self) -> dict[str, Any]:
        """By rows."""
        result: dict[str, Any] = {}
        for rows, seconds in self.step_s.items():
            floor, one = ratio_of(seconds, self.read_s), ratio_of(seconds, self.step_s[1])
            result[str(rows)] = {
                "ms": round(1000 * statistics.median(seconds), 3),
                "least_ms": round(1000 * min(seconds), 3),
                "over_floor": round(floor.mean, 3),
                "over_floor_95": [round(floor.low, 3), round(floor.high, 3)],
                "over_one_row": round(one.mean, 3),
                "over_one_row_95": [round(one.low, 3), round(one.high, 3)],
            }
        return result


def load(folder: Path, dtype: str, context: int, kernels: str, rows: Sequence[int]) -> Steps:
    """A model whose cache holds random numbers."""
    import numpy as np
    import torch

    from outrider.engine.model import LlamaModel
    from outrider.engine.runner import Runner

    model = LlamaModel.load(folder, dtype, kernels=kernels)
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = max(rows) * blocks_each
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(-1, blocks_each).tolist()
    runner = Runner(model, num_blocks, BLOCK_SIZE)
    for tensor in runner.cache.tensors:
        tensor.normal_()
    batches = {count: batch_of(count, context, tables) for count in rows}
    for batch in batches.values():
        runner.forward(batch)
    return Steps(runner, torch.ones(model.weight_bytes // 4), batches)


def run(
    folder: Path,
    dtypes: Sequence[str],
    rounds: int,
    *,
    context: int = CONTEXT,
    kernels: str = "auto",
    rows: Sequence[int] = (*ONE_SEQUENCE, *MANY_SEQUENCES),
) -> dict[str, Any]:
    """Measure, and say it as the last line does."""
    steps = {dtype: load(folder, dtype, context, kernels, rows) for dtype in dtypes}
    bystanders = Bystanders()
    for _ in range(rounds):
        for each in steps.values():
            each.round()
    speeds = [speed for each in steps.values() for speed in each.read_gb_s]
    report: dict[str, Any] = {"read_gb_s": round(statistics.median(speeds), 2)}
    report["other_cores"] = bystanders.cores
    for dtype, each in steps.items():
        report[SHORT_NAMES.get(dtype, dtype)] = each.report()
    return report


def print_table(report: dict[str, Any]) -> None:
    """The same for people."""
    print("precision rows       ms    least  over floor (95 %)         over one row (95 %)")
    for name, by_rows in report.items():
        if not isinstance(by_rows, dict):
            continue
        for rows, it in by_rows.items():
            cells = [
                f"{it[what]:6.2f} ({it[what + '_95'][0]:.2f} to {it[what + '_95'][1]:.2f})"
                for what in ("over_floor", "over_one_row")
            ]
            print(f"{name:9} {rows:>4} {it['ms']:8.2f} {it['least_ms']:8.2f}", *cells, sep="  ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", default="", help="comma-separated; all of them if not given")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch"))
    options = parser.parse_args(arguments)
    prepare_cpu(options.threads)
    from outrider.engine.device import DTYPES

    dtypes = options.dtypes.split(",") if options.dtypes else list(DTYPES)
    report = run(
        resolve(options.model),
        dtypes,
        options.rounds,
        context=options.context,
        kernels=options.kernels,
    )
    print(
        f"{options.threads} threads, {options.context} tokens of context, {options.kernels};",
        end="",
    )
    print(f" {report['read_gb_s']} GB/s read; others used {report['other_cores']} cores")
    print_table(report)
    if SHARES_OF in dtypes:
        report["shares"] = step_shares(options.model, SHARES_OF, options.threads)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
