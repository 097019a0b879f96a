"""Outrider's engine alone: no services, no network, no event loop.

python -m bench.peers.worker_engine MODEL DTYPE THREADS
"""

from __future__ import annotations

import sys
import time

from outrider.engine.numerics import prepare_cpu

MODEL, DTYPE, THREADS = sys.argv[1:]
prepare_cpu(int(THREADS))  # before anything imports torch

from bench.engine_loop import EngineLoop  # noqa: E402
from bench.peers.lines import Answer, Ask, serve  # noqa: E402
from outrider.engine.block_pool import BLOCK_SIZE  # noqa: E402
from outrider.engine.model import LlamaModel  # noqa: E402
from outrider.engine.runner import Runner  # noqa: E402
from outrider.models.resolve import resolve  # noqa: E402

NUM_BLOCKS = 1024
PLACES = 32
STEP_TOKENS = 512


def load() -> tuple[str, Ask]:
    """The model, warm."""
    runner = Runner(LlamaModel.load(resolve(MODEL), DTYPE), NUM_BLOCKS, BLOCK_SIZE)
    runner.warm(MODEL)
    loop = EngineLoop(runner, PLACES)

    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        began = time.perf_counter()
        requests = loop.admit([(prompt, num_tokens) for prompt in prompts])
        scheduler = loop.scheduler(requests, PLACES, STEP_TOKENS)
        first_s = None
        while scheduler.running or scheduler.waiting:
            made = loop.step(scheduler)
            first_s = first_s or (time.perf_counter() - began if made else None)
        seconds = time.perf_counter() - began
        texts = [request.sequence.token_ids[-num_tokens:] for request in requests]
        return Answer(seconds, first_s, texts)

    return f"outrider's engine {runner.model.precision}", ask


if __name__ == "__main__":
    serve(load)
