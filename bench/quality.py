"""What each precision costs in quality: perplexity and best tokens on the model's own chats.

    python -m bench.quality --tokens 20000

Answers are sampled from the model in float32 at temperature 0.8, and each precision then reads
them: its perplexity, and how often its best token is float32's. Bytes are those of all matrices.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.numerics import prepare_cpu
from outrider.models.resolve import resolve

if TYPE_CHECKING:
    import torch

    from outrider.engine.model import LlamaModel

QUESTIONS = (
    "How do vaccines work?",
    "Write a short story about a lighthouse keeper.",
    "Explain recursion to a child.",
    "What is the capital of Australia, and what is it known for?",
    "Write a Python function that reverses a linked list.",
    "Sum up the plot of Romeo and Juliet.",
    "Give me a recipe for tomato soup.",
    "What causes tides?",
    "A train travels 120 km in 2 hours. How far does it go in 5 hours?",
    "Translate into French: The weather is nice today and we go to the park.",
    "List ten ideas for a birthday party.",
    "What is the difference between TCP and UDP?",
    "Write a poem about autumn.",
    "Who was Marie Curie?",
    "Write an email asking my boss for two days of leave.",
    "What are the pros and cons of solar power?",
)
PRECISIONS = (
    *("bfloat16", "int8", "int4"),
    *("float32+int8-cache", "bfloat16+int8-cache", "int8+int8-cache", "int4+int8-cache"),
)
MAX_TOKENS = 640
TEMPERATURE = 0.8
BLOCKS_EACH = 1024 // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Quality:
    """What one precision made of the texts."""

    bytes_a_parameter: float
    """Of all matrices."""
    perplexity: float
    best_token_agreement: float
    """Share of positions whose best token is float32's."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, read with each precision, print a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    prepare_cpu(options.threads)
    num_tokens, found = measure(resolve(options.model), options.tokens)
    exact, bfloat16 = found["float32"], found["bfloat16"]
    print(f"{num_tokens} tokens, sampled at temperature {TEMPERATURE}")
    print("precision bytes-a-parameter perplexity over-float32 over-bfloat16 best-token-as-float32")
    for name, quality in found.items():
        over = [quality.perplexity / other.perplexity - 1 for other in (exact, bfloat16)]
        print(
            f"{name:19} {quality.bytes_a_parameter:.3f} {quality.perplexity:.4f} {over[0]:+.2%} "
            f"{over[1]:+.2%} {quality.best_token_agreement:.2%}"
        )
    print(json.dumps({"tokens": num_tokens} | {name: asdict(each) for name, each in found.items()}))


def measure(
    folder: Path, num_tokens: int, precisions: Sequence[str] = PRECISIONS
) -> tuple[int, dict[str, Quality]]:
    """(tokens read, at least num_tokens; the quality of float32 and of each precision)."""
    from gateway.tokenizer import ModelTokenizer
    from outrider.engine.model import LlamaModel

    tokenizer = ModelTokenizer.load(folder)
    prompts = [tokenizer.encode_chat([("user", text)]) for text in QUESTIONS]
    exact = LlamaModel.load(folder, "float32")
    num_parameters = exact.weight_bytes / 4
    texts: list[tuple[int, list[int]]] = []
    seed = 0
    while sum(len(text) - begin for begin, text in texts) < num_tokens:
        texts += sample(exact, prompts, seed)
        seed += 1
    loss, best = read(exact, texts)
    found = {"float32": Quality(4.0, math.exp(loss), 1.0)}
    del exact
    for precision in precisions:
        dtype, _, cache = precision.partition("+")
        model = LlamaModel.load(folder, dtype, kv_dtype="int8" if cache else "auto")
        loss, rounded_best = read(model, texts)
        agreement = float((best == rounded_best).float().mean())
        bytes_a_parameter = model.weight_bytes / num_parameters
        found[precision] = Quality(bytes_a_parameter, math.exp(loss), agreement)
    return sum(len(text) - begin for begin, text in texts), found


def sample(
    model: LlamaModel, prompts: list[list[int]], seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(where the answer begins, ids of prompt and answer) of each prompt."""
    import torch

    from outrider.engine.runner import Runner

    generator = torch.Generator().manual_seed(seed)
    runner = Runner(model, BLOCKS_EACH * len(prompts))
    texts = [list(prompt) for prompt in prompts]
    tables = [[*range(BLOCKS_EACH * i, BLOCKS_EACH * (i + 1))] for i in range(len(prompts))]
    items = [BatchItem(text, 0, table, 1) for text, table in zip(texts, tables, strict=True)]
    running = list(range(len(texts)))
    while running:
        probs = torch.softmax(runner.forward(Batch(items)) / TEMPERATURE, -1)
        drawn = torch.multinomial(probs, 1, generator=generator)[:, 0].tolist()
        for i, token_id in zip(running, drawn, strict=True):
            texts[i].append(token_id)
        running = [
            i
            for i, token_id in zip(running, drawn, strict=True)
            if token_id not in model.config.eos_token_ids
            and len(texts[i]) < len(prompts[i]) + MAX_TOKENS
        ]
        items = [BatchItem(texts[i][-1:], len(texts[i]) - 1, tables[i], 1) for i in running]
    return zip(map(len, prompts), texts, strict=True)


def read(model: LlamaModel, texts: list[tuple[int, list[int]]]) -> tuple[float, torch.Tensor]:
    """(mean negative log-probability of the answers' tokens, the best token at each)."""
    import torch

    from outrider.engine.runner import Runner

    runner = Runner(model, BLOCKS_EACH)
    losses, best = [], []
    for begin, text in texts:
        item = BatchItem(text[:-1], 0, list(range(BLOCKS_EACH)), len(text) - begin)
        logits = runner.forward(Batch([item]))
        targets = torch.tensor(text[begin:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        best.append(logits.argmax(-1))
    return float(torch.cat(losses).mean()), torch.cat(best)


if __name__ == "__main__":
    main()
