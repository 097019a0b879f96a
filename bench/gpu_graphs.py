"""Captured steps beside the same steps without capture: equal or not, and what they wait for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner

LENGTHS = (5, 18, 40, 530, 200, 33)
"""Tokens of the sequences at the beginning."""
K = 4
"""Drafts of each, of which any number stand."""


def check_graphs(
    model: LlamaModel,
    *,
    lengths: Sequence[int] = LENGTHS,
    k: int = K,
    rounds: int = 16,
    graph_rows: int = 64,
) -> dict[str, Any]:
    """Steps that differ, the share of tables laid out ahead, and what a step waits for, if so."""
    chance = random.Random(0)
    length = max(lengths) + rounds * (k + 1)
    each = -(-length // BLOCK_SIZE)
    runners = [Runner(model, each * len(lengths), graph_rows=rows) for rows in (graph_rows, 0)]
    graphs = runners[0].graphs
    assert graphs is not None
    graphs.capture()
    blocks = list(range(each * len(lengths)))
    chance.shuffle(blocks)
    tables = [blocks[i * each : (i + 1) * each] for i in range(len(lengths))]

    def item(i: int, start: int, count: int) -> BatchItem:
        ids = [chance.randrange(model.config.vocab_size) for _ in range(count)]
        return BatchItem(ids, start, tables[i][: -(-(start + count) // BLOCK_SIZE)], count)

    starts, differing, waits = list(lengths), 0, ""
    for i, count in enumerate(lengths):
        prompt = Batch([item(i, 0, count)])
        for runner in runners:
            runner.forward(prompt)
    graphs.num_replayed = graphs.tables.num_known = graphs.tables.num_placed = 0
    for _ in range(rounds):
        batch = Batch([item(i, start, k + 1) for i, start in enumerate(starts)])
        found = []
        for runner in runners:
            try:
                with _no_waiting(model.device):
                    found.append(runner.forward(batch))
            except RuntimeError as error:
                waits = str(error)
                found.append(runner.forward(batch))
        differing += not torch.equal(*found)
        starts = [start + chance.randint(1, k + 1) for start in starts]
    return {
        "steps": rounds,
        "replayed": graphs.num_replayed,
        "differing": differing,
        "known_tables": round(graphs.tables.num_known / graphs.tables.num_placed, 3),
        "waits": waits,
    }


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Whatever would wait for the device raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
