"""transformers in bfloat16: `generate` for one prompt, `generate_batch` for several.

python -m bench.peers.worker_transformers FOLDER THREADS one|many
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers

from bench.peers.lines import Answer, Ask, serve


class FirstToken:
    """A streamer that notes when the first token came; the prompt is handed over before it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens of the prompt, then one after the other."""
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def load() -> tuple[str, Ask]:
    """A model, and the way to ask it that the last argument names."""
    folder, threads, mode = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    name = f"transformers {transformers.__version__} bfloat16"
    return name, _one(model) if mode == "one" else _many(model)


def _one(model: Any) -> Ask:
    @torch.inference_mode()
    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        began = time.perf_counter()
        ids, first = torch.tensor(prompts), FirstToken()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_config(num_tokens),
            streamer=first,
        )
        seconds = time.perf_counter() - began
        return Answer(seconds, first.times[1] - began, out[:, ids.shape[1] :].tolist())

    return ask


def _many(model: Any) -> Ask:
    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        began = time.perf_counter()
        # Without a manager that stays, each call makes one anew: 8 s of a processor. The first
        # question decides how large it is.
        results = model.generate_batch(
            prompts,
            generation_config=_config(num_tokens),
            progress_bar=False,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - began
        return Answer(seconds, None, [each.generated_tokens for each in results.values()])

    return ask


def _config(num_tokens: int) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
    )


if __name__ == "__main__":
    serve(load)
