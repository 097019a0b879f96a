"""Bit for bit, on SmolLM2 and a tiny model: whatever the target's scheduler makes of some requests,
each gets the logits and the tokens that it gets alone.

The company, the order, k, right and wrong drafts, how prompts are cut, preemptions, the prefix
cache and one or two threads are drawn at random; see tests/support/mixes.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.params import SamplingParams
from tests.support.kernels import are_interpreted
from tests.support.mixes import Mix, PlainText, Tally
from tests.support.tiny_models import make_tiny_model

NUM_BLOCKS = 64
SHARED_TOKENS = 16 if are_interpreted() else 40
"""Beginning of half of the prompts."""
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
PENALISED = SamplingParams(temperature=1.0, top_k=50, seed=3, repetition_penalty=1.2)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def play(
    folder: Path,
    precision: str,
    seeds: range,
    num_texts: int,
    longest: int,
    most_new: int,
    is_complete: bool = True,
) -> None:
    """Those mixes of some texts: so long is the longest prompt, and so many tokens follow.

    is_complete: so many that everything a mix can have must have happened.
    """
    dtype, _, cache = precision.partition("+")
    model = LlamaModel.load(folder, dtype, kv_dtype="int8" if cache else "auto")
    runner = Runner(model, NUM_BLOCKS)
    rng = random.Random(num_texts)
    vocab_size = runner.model.config.vocab_size
    shared = [rng.randrange(3, vocab_size) for _ in range(SHARED_TOKENS)]
    texts = []
    for i in range(num_texts):
        length = rng.choice([1, 15, 16, 17, rng.randint(2, longest)])
        begin = shared if i % 2 else []
        own = [rng.randrange(3, vocab_size) for _ in range(max(1, length - len(begin)))]
        sampling = (GREEDY, SEEDED, PENALISED)[i % 3]
        texts.append(PlainText.run(runner, begin + own, sampling, rng.randint(4, most_new)))
    tally = Tally()
    for seed in seeds:
        Mix(runner, texts, seed, tally).play()
    print(precision, tally)
    if is_complete:
        tally.check()
    assert tally.differences == [] and tally.rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "count"), [("float32", 6), ("int8", 10), ("auto", 10)])
def test_some_mixes_give_the_same_bits(smollm2_folder: Path, dtype: str, count: int) -> None:
    """A sample, of short texts."""
    play(smollm2_folder, dtype, range(count), num_texts=6, longest=40, most_new=12)


@pytest.mark.timeout(120)  # loads transformers to make one
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16+int8-cache"])
def test_some_mixes_of_a_tiny_model_give_the_same_bits(tmp_path: Path, precision: str) -> None:
    """One of the shapes that every implementation has."""
    folder = make_tiny_model(tmp_path, head_dim=64)
    if are_interpreted():  # too slow for all that a mix must have
        play(folder, precision, range(2), num_texts=2, longest=20, most_new=6, is_complete=False)
    else:
        play(folder, precision, range(12), num_texts=4, longest=40, most_new=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "auto", "int8+int8-cache"])
def test_two_hundred_mixes_give_the_same_bits(smollm2_folder: Path, precision: str) -> None:
    """Two hundred, of texts with up to 200 tokens."""
    play(smollm2_folder, precision, range(200), num_texts=12, longest=180, most_new=32)
