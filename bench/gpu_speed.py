"""How fast a device reads memory, and how far above that floor a large model's steps are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser
from outrider.params import SamplingParams

SHAPES = ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1))
"""Sequences of a step, and tokens of each: one, or one with four drafts."""
CONTEXT = 1024
ROUNDS = 7
GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=0.8, top_k=200, top_p=0.95, seed=1)


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Each of several runs, the first one not among them."""
    found = []
    for i in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        if i:
            found.append(time.perf_counter() - began)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_gb_s(device: torch.device, num_bytes: int = 4 << 30, rounds: int = ROUNDS) -> float:
    """The best of some copies, which read and write: bytes of both in a second."""
    source = torch.ones(num_bytes // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / min(seconds_of(lambda: copy.copy_(source), device, rounds)) / 1e9


def run_step(runner: Runner, batch: Batch, sampling: SamplingParams) -> None:
    """One step; of each sequence all tokens but the first are drafts."""
    vocab_size, ops = runner.model.config.vocab_size, runner.model.ops
    chooser = TokenChooser(sampling, vocab_size, prompt_len=1)
    logits, wanted, first = runner.forward(batch), [], 0
    for item in batch.items:
        confirmed, drafts = [0] * item.start + item.token_ids[:1], item.token_ids[1:]
        wanted.append(Rows(logits, chooser, confirmed, drafts, first))
        first += item.num_logits
    choose_tokens(wanted, ops.choose, on_device=ops.chooses_on_device)


def check_speed(
    model: LlamaModel,
    gb_s: float,
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    graph_rows: int = 0,
) -> dict[str, Any]:
    """Milliseconds of a step to its token ids, beside reading all weights and keys once.

    Greedy; and, as `filtered_ms`, with the filters that take the longest to choose from.
    graph_rows: as for a Runner.
    """
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = max(sequences for sequences, _ in shapes) * blocks_each
    runner = Runner(model, num_blocks, graph_rows=graph_rows)
    if runner.graphs is not None:
        runner.graphs.capture()
    block_bytes = runner.cache.block_bytes
    report: dict[str, Any] = {"weight_gib": round(model.weight_bytes / 2**30, 3)}
    for sequences, tokens in shapes:
        batch = Batch(
            [
                BatchItem(
                    [7] * tokens,
                    context - tokens,
                    list(range(i * blocks_each, (i + 1) * blocks_each)),
                    tokens,
                )
                for i in range(sequences)
            ]
        )
        step = seconds_of(partial(run_step, runner, batch, GREEDY), model.device, rounds)
        filtered = seconds_of(partial(run_step, runner, batch, FILTERED), model.device, rounds)
        read = model.weight_bytes + sequences * blocks_each * block_bytes
        floor = read / gb_s / 1e9
        report[f"{sequences} x {tokens}"] = {
            "ms": round(1000 * statistics.median(step), 3),
            "least_ms": round(1000 * min(step), 3),
            "filtered_ms": round(1000 * statistics.median(filtered), 3),
            "floor_ms": round(1000 * floor, 3),
            "over_floor": round(min(step) / floor, 3),
        }
    return report
