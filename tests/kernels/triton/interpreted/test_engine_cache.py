"""The engine with keys and values in 8 bits: what is kept, and that it is what attention reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import numerics_id
from outrider.engine.runner import Runner
from outrider_kernels.kv_scaled import widen_rows
from tests.support.mixes import poison
from tests.support.tiny_models import make_tiny_model

LARGEST_ERROR = {"int8": 0.5 / 127, "e4m3": 1 / 16}
"""Of a value, by the row's largest: half a step, by which float32 is rounded."""
TEXT = [5, 9, 200, 31, 77, 3, 8, 250, 90, 14, 6, 7, 61, 62, 63, 64, 300, 301, 12, 13]
BLOCKS = [3, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads that the kernels have in bfloat16."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=64)


def make_runner(folder: Path, kv_dtype: str) -> Runner:
    """The model in bfloat16 and a cache without a number in it."""
    model = LlamaModel.load(folder, "bfloat16", kernels="triton", kv_dtype=kv_dtype)
    runner = Runner(model, 4)
    poison(runner)
    return runner


def forward(runner: Runner, sizes: list[int]) -> torch.Tensor:
    """Logits of all of TEXT, in chunks of these sizes."""
    rows, start = [], 0
    for size in sizes:
        item = BatchItem(TEXT[start : start + size], start, BLOCKS, size)
        rows.append(runner.forward(Batch([item])))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("kv_dtype", LARGEST_ERROR)
def test_keys_and_values_are_kept_rounded_and_read_with_their_scales(
    folder: Path, kv_dtype: str
) -> None:
    """The first layer's are those of a plain cache but for rounding; logits are nearly the same."""
    plain, small = make_runner(folder, "auto"), make_runner(folder, kv_dtype)
    expected, got = forward(plain, [len(TEXT)]), forward(small, [len(TEXT)])
    assert 0 < (got - expected).norm() / expected.norm() < 0.1
    k_scales, v_scales = small.cache.scales[0]
    for exact, rounded, scales in (
        (plain.cache.keys[0], small.cache.keys[0], k_scales),
        (plain.cache.values[0], small.cache.values[0], v_scales),
    ):
        written, kept = (x[BLOCKS].flatten(0, 1)[: len(TEXT)] for x in (exact, rounded))
        wide = widen_rows(kept, scales[BLOCKS].flatten(0, 1)[: len(TEXT)])
        largest = written.float().abs().amax(-1, keepdim=True)
        error = (wide - written.float()).abs() / largest
        assert float(error.max()) < LARGEST_ERROR[kv_dtype] + 2**-8


@pytest.mark.parametrize("kv_dtype", LARGEST_ERROR)
def test_chunks_and_wrong_drafts_change_no_bit(folder: Path, kv_dtype: str) -> None:
    """A token's row of the cache is made of that token alone, and written anew over a draft's."""
    runner = make_runner(folder, kv_dtype)
    whole = forward(runner, [len(TEXT)])
    poison(runner)
    first = forward(runner, [7])
    runner.forward(Batch([BatchItem([1, 2, 4, 11], 7, BLOCKS, 0)]))
    again = runner.forward(Batch([BatchItem(TEXT[7:], 7, BLOCKS, len(TEXT) - 7)]))
    assert torch.equal(torch.cat([first, again]), whole)


def test_memory_and_name_say_what_is_kept(folder: Path) -> None:
    """Four bytes of a scale for 64 values; each kind of cache has a numerics id of its own."""
    runners = {name: make_runner(folder, name) for name in ("auto", *LARGEST_ERROR)}
    for name, runner in runners.items():
        row_bytes = 2 * 64 if name == "auto" else 64 + 4
        assert (
            runner.cache.block_bytes == runner.model.block_bytes(16) == 2 * 2 * 16 * 2 * row_bytes
        )
        assert runner.model.kv_dtype == ("bfloat16" if name == "auto" else name)
    assert len({numerics_id(runner.model) for runner in runners.values()}) == 3
