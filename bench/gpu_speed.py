"""How fast a device reads memory, and how far above that floor a large model's steps are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner

SHAPES = ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1))
"""Sequences of a step, and tokens of each: one, or one with four drafts."""
CONTEXT = 1024
ROUNDS = 7


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


def check_speed(
    model: LlamaModel,
    gb_s: float,
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Milliseconds of a step to its logits on the CPU, beside reading all weights and keys once."""
    blocks_each = -(-context // BLOCK_SIZE)
    runner = Runner(model, max(sequences for sequences, _ in shapes) * blocks_each)
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
        step = seconds_of(lambda batch=batch: runner.forward(batch), model.device, rounds)  # type: ignore[misc]
        read = model.weight_bytes + sequences * blocks_each * block_bytes
        floor = read / gb_s / 1e9
        report[f"{sequences} x {tokens}"] = {
            "ms": round(1000 * statistics.median(step), 3),
            "least_ms": round(1000 * min(step), 3),
            "floor_ms": round(1000 * floor, 3),
            "over_floor": round(min(step) / floor, 3),
        }
    return report
