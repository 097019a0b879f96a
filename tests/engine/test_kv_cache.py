"""The tensors of the paged cache: zero, of the model's shape, and free until they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outrider.engine.config import ModelConfig
from outrider.engine.kv_cache import KVCache
from outrider.engine.memory import block_bytes
from tests.support.tiny_models import make_tiny_model

BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Of a model with two layers and two KV heads."""
    return ModelConfig.load(make_tiny_model(tmp_path / "model"))


def resident_bytes() -> int:
    """Memory that this process has now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_zero_and_do_not_share(config: ModelConfig, dtype: torch.dtype) -> None:
    """What is written into one tensor shows in no other."""
    cache = KVCache(config, 3, BLOCK_SIZE, dtype, torch.device("cpu"))
    tensors = [*cache.keys, *cache.values]
    assert [list(t.shape) for t in tensors] == [[3, BLOCK_SIZE, 2, config.head_dim]] * 4
    assert all(t.dtype == dtype and not t.any() for t in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [t.unique().tolist() for t in tensors] == [[1], [2], [3], [4]]


def test_rows_in_int8_have_their_scales_behind_them(config: ModelConfig) -> None:
    """A block is still one piece of each tensor, and takes what was counted on."""
    for name, dtype in DTYPES.items():
        cache = KVCache(config, 3, BLOCK_SIZE, dtype, torch.device("cpu"))
        assert cache.block_bytes == block_bytes(config, BLOCK_SIZE, name, scales_apart=False)
        assert cache.tensors == [*cache.keys, *cache.values]
    row_size = config.head_dim + 2 * -(-config.head_dim // 32)
    assert [list(t.shape) for t in cache.keys] == [[3, BLOCK_SIZE, 2, row_size]] * 2


def test_scales_apart_are_tensors_of_each_layer(config: ModelConfig) -> None:
    """Of 8 bits only; rows are then values alone, and a block takes what was counted on."""
    for name, dtype in (DTYPES | {"e4m3": torch.float8_e4m3fn}).items():
        cache = KVCache(config, 3, BLOCK_SIZE, dtype, torch.device("cpu"), scales_apart=True)
        assert cache.block_bytes == block_bytes(config, BLOCK_SIZE, name, scales_apart=True)
        assert cache.keys[0].shape == (3, BLOCK_SIZE, 2, config.head_dim)
        scales = [scale for pair in cache.scales for scale in pair]
        assert len(scales) == (4 if name in ("int8", "e4m3") else 0)
        assert all(s.dtype == torch.float32 and s.shape == (3, BLOCK_SIZE, 2) for s in scales)
        assert len({tensor.data_ptr() for tensor in cache.tensors}) == 4 + len(scales)


def test_blocks_that_nothing_has_written_take_no_memory(config: ModelConfig) -> None:
    """A pool of 64 MiB costs next to nothing until its blocks are used, and then those alone."""
    num_blocks = (64 << 20) // (4 * BLOCK_SIZE * 2 * config.head_dim * 4)
    before = resident_bytes()
    cache = KVCache(config, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    assert resident_bytes() - before < 4 << 20
    for tensor in (*cache.keys, *cache.values):
        tensor[: num_blocks // 4] = 1.0
    assert 12 << 20 < resident_bytes() - before < 24 << 20
