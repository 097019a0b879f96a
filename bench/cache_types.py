"""Attention over caches of each type against bfloat16's, by sequences and context.

    python -m bench.cache_types --threads 1 --pairs 15

The attention of SmolLM2-135M's 30 layers with compiled operations, each layer with a cache of its
own, so that keys and values come from where a step finds them. Milliseconds are the processor's, of
all threads, so that other work on the machine matters less. The types take turns: a ratio is of
runs next to each other, with its 95 % interval; below one the type is faster than bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.ratios import ratio_of

if TYPE_CHECKING:
    import torch

    from outrider_kernels.native_attention import NativePlan

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
BLOCK_SIZE = 16
CONTEXTS = (256, 1024)
SHARES = ((1, 1), (1, 5), (8, 1), (32, 1))
"""Sequences, and query tokens of each."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args(arguments)
    from outrider.engine.numerics import prepare_cpu

    prepare_cpu(options.threads)
    import torch

    from outrider_kernels.kv_rows import round_kv

    print("context sequences queries type MiB ms ratio low high")
    for context in CONTEXTS:
        num_blocks = context // BLOCK_SIZE
        for num_sequences, num_queries in SHARES:
            shape = (num_sequences * num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            wide = [torch.randn(shape) for _ in range(2)]
            types = {
                "bfloat16": [each.bfloat16() for each in wide],
                "float32": wide,
                "int8": [round_kv(each) for each in wide],
            }
            caches = {
                name: [tuple(each.clone() for each in pair) for _ in range(LAYERS)]
                for name, pair in types.items()
            }
            seconds: dict[str, list[float]] = {name: [] for name in caches}
            plan = _plan(num_sequences, num_queries, context)
            q = torch.randn(num_sequences * num_queries, HEADS, HEAD_DIM)
            for _ in range(options.pairs + 1):  # the first is not counted
                for name, layers in caches.items():
                    seconds[name].append(_attend(q, layers, plan))
            for name, layers in caches.items():
                mib = sum(each.nbytes for pair in layers for each in pair) / 2**20
                median = 1e3 * statistics.median(seconds[name][1:])
                ratio = ratio_of(seconds[name][1:], seconds["bfloat16"][1:])
                print(
                    f"{context:5} {num_sequences:3} {num_queries:3} {name:9} {mib:7.1f}"
                    f" {median:8.2f} {ratio.mean:6.3f} {ratio.low:6.3f} {ratio.high:6.3f}",
                    flush=True,
                )


def _plan(num_sequences: int, num_queries: int, context: int) -> NativePlan:
    """The last tokens of sequences whose blocks lie one after the other."""
    from outrider_kernels.native_attention import plan_attention

    blocks = context // BLOCK_SIZE
    return plan_attention(
        [num_queries] * num_sequences,
        [context - num_queries] * num_sequences,
        [list(range(i * blocks, (i + 1) * blocks)) for i in range(num_sequences)],
        block_size=BLOCK_SIZE,
        num_heads=HEADS,
        kv_heads=KV_HEADS,
        num_rows=num_sequences * num_queries,
    )


def _attend(q: torch.Tensor, layers: list[tuple[torch.Tensor, ...]], plan: NativePlan) -> float:
    """Seconds of the processor, of all threads, for all layers."""
    from outrider_kernels.native_attention import paged_attention
    from outrider_kernels.native_library import load_library

    library = load_library()
    began = time.process_time()
    for keys, values in layers:
        paged_attention(library, q, keys, values, plan)
    return time.process_time() - began


if __name__ == "__main__":
    main()
