"""All matrix products of a model's step, plain torch against compiled, by precision and rows.

    python -m bench.products --threads 1

SmolLM2-135M's shapes, random numbers, a copy for each layer so that weights come from memory. Both
take turns; milliseconds are the least of `--repeats`. The floor is bytes over the bandwidth that a
sum over the same float32 weights reaches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
ROWS = (1, 2, 5, 8, 16, 32, 256)
PRECISIONS = ("float32", "bfloat16", "int8", "int4")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    from outrider.engine.numerics import prepare_cpu

    prepare_cpu(options.threads)
    import torch

    from outrider.engine.device import DTYPES, rounding_of
    from outrider_kernels.ops import select_ops

    cpu = torch.device("cpu")
    shapes = [*SHAPES * LAYERS, HEAD]
    originals = [torch.randn(shape) for shape in shapes]
    num_bytes = sum(each.nbytes for each in originals)
    seconds = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        for each in originals:
            each.sum()
        seconds.append(time.perf_counter() - began)
    bandwidth = num_bytes / min(seconds)
    print(f"{options.threads} threads, reading {bandwidth / 1e9:.0f} GB/s; ms of all products")
    print("precision rows torch compiled ratio over_floor over_one_row")
    for precision in PRECISIONS:
        dtype, sides = DTYPES[precision], []
        for kernels in ("torch", "auto"):
            ops = select_ops(cpu, kernels, rounding=rounding_of(precision))
            packed = [ops.pack(weight.to(dtype)) for weight in originals[:-1]]
            sides.append((ops, [*packed, ops.pack_table(originals[-1].to(dtype))]))
        floor = sum(packed.nbytes for packed in sides[1][1]) / bandwidth
        one_row = 0.0
        for num_rows in ROWS:
            inputs = {width: torch.randn(num_rows, width).to(dtype) for width in (576, 1536)}
            least = [float("inf")] * 2
            for _ in range(options.repeats):
                for i, (ops, weights) in enumerate(sides):
                    began = time.perf_counter()
                    with torch.inference_mode():
                        for (_, width), weight in zip(shapes, weights, strict=True):
                            ops.linear(inputs[width], weight, None)
                    least[i] = min(least[i], time.perf_counter() - began)
            one_row = one_row or least[1]
            print(
                f"{precision:9} {num_rows:4} {1000 * least[0]:7.1f} {1000 * least[1]:7.2f}"
                f" {least[0] / least[1]:6.2f} {least[1] / floor:6.2f} {least[1] / one_row:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
