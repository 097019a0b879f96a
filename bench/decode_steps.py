"""A decode step with compiled operations against plain torch, by sequences and context.

    python -m bench.decode_steps --dtype float32 --steps 5

Both take turns on one thread, and it is the processor's time that counts: other work on the machine
then only shows as far as it takes memory and caches away.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.numerics import prepare_cpu
from outrider.models.resolve import resolve

CONTEXTS = (256, 1024)
SEQUENCES = (1, 8, 32)
BLOCKS_EACH = 1024 // BLOCK_SIZE


def main(arguments: Sequence[str] | None = None) -> None:
    """Print milliseconds of each kind of step, the least of `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1, help="of a sequence in a step")
    options = parser.parse_args(arguments)
    prepare_cpu(1)
    import numpy as np

    from outrider.engine.model import LlamaModel
    from outrider.engine.runner import Runner

    num_blocks = max(SEQUENCES) * BLOCKS_EACH
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(-1, BLOCKS_EACH).tolist()
    runners = []
    for kernels in ("torch", "auto"):
        model = LlamaModel.load(resolve(options.model), options.dtype, kernels=kernels)
        runners.append(Runner(model, num_blocks, BLOCK_SIZE))
        for tensor in (*runners[-1].cache.keys, *runners[-1].cache.values):
            tensor.normal_()
    print(f"{options.dtype}, {options.tokens} tokens a sequence, ms of a processor")
    print("context sequences", *(runner.model.ops.name for runner in runners), "ratio")
    for context in CONTEXTS:
        for num_sequences in SEQUENCES:
            start = context - options.tokens
            item = [7] * options.tokens
            batch = Batch([BatchItem(item, start, t, 1) for t in tables[:num_sequences]])
            least = [float("inf")] * 2
            for _ in range(options.steps):
                for i, runner in enumerate(runners):
                    began = time.process_time()
                    runner.forward(batch)
                    least[i] = min(least[i], 1000 * (time.process_time() - began))
            print(f"{context:7} {num_sequences:9} {least[0]:9.1f} {least[1]:9.1f}", end=" ")
            print(f"{least[0] / least[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
