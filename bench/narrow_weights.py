"""Products with bfloat16 weights: widened on the way, or by the library's own. One table.

    python bench/narrow_weights.py [--threads N]

For every shape of SmolLM2-135M and two of a larger model: milliseconds of a product with float32
weights, with bfloat16 weights as the engine computes it, and with torch's bfloat16 product; and the
row counts at which rows of the latter two differ from the same rows in a product of 512.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

SHAPES = (
    (576, 960),
    (576, 576),
    (576, 3072),
    (1536, 576),
    (576, 49152),
    (2048, 2048),
    (2048, 8192),
)
ROW_COUNTS = (8, 64)
CHECKED = (8, 9, 16, 17, 33, 64, 100, 300)
REPEATS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    from outrider.engine.numerics import prepare_cpu

    prepare_cpu(threads)
    import torch

    from outrider_kernels.linear import RowPlan, linear

    print(f"torch {torch.__version__}, {threads} threads; ms, the best of {REPEATS}")
    print("shape, rows: float32 | bfloat16 widened | bfloat16 native; rows that differ in each")
    for num_in, num_out in SHAPES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(512, num_in, generator=generator)
        weight = torch.randn(num_in, num_out, generator=generator) / num_in**0.5
        narrow_x, narrow = x.bfloat16(), weight.bfloat16()

        def widened(rows: torch.Tensor, weight: torch.Tensor = narrow) -> torch.Tensor:
            return linear(rows, weight, None, RowPlan())

        def native(rows: torch.Tensor, weight: torch.Tensor = narrow) -> torch.Tensor:
            return torch.mm(rows, weight)

        with torch.inference_mode():
            differ = []
            for product in (widened, native):
                whole = product(narrow_x)
                differ.append(
                    [n for n in CHECKED if not torch.equal(product(narrow_x[:n]), whole[:n])]
                )
            for n in ROW_COUNTS:
                times = _best_ms(
                    [
                        partial(torch.mm, x[:n], weight),
                        partial(widened, narrow_x[:n]),
                        partial(native, narrow_x[:n]),
                    ]
                )
                cells = " | ".join(f"{ms:7.2f}" for ms in times)
                print(f"{num_in} x {num_out}, {n:2}: {cells}; {differ[0]} {differ[1]}", flush=True)


def _best_ms(products: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, measured in turn so that other work disturbs all alike."""
    best = [float("inf")] * len(products)
    for _ in range(REPEATS):
        for i, product in enumerate(products):
            started = time.perf_counter()
            product()
            best[i] = min(best[i], 1000 * (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    main()
