"""The tensors behind the block pool: keys and values of every layer, by block.

    keys[layer], values[layer]    [num_blocks, block_size, kv_heads, head_dim]

In int8 the last dimension is a little longer: scales stand behind the values they belong to (see
outrider_kernels/kv_rows.py), so a block is still one piece of each tensor.

Who owns a block is the pool's matter; a slot that no sequence has written holds anything.
"""

from __future__ import annotations

import math
import mmap

import torch

from outrider.engine.config import ModelConfig
from outrider_kernels.kv_rows import kv_row_size


class KVCache:
    """Keys and values of `num_blocks` blocks."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        row_size = kv_row_size(config.head_dim, dtype)
        shape = (num_blocks, block_size, config.num_kv_heads, row_size)
        self.kv_dtype = str(dtype).removeprefix("torch.")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        layers = range(config.num_layers)
        self.keys = [_zeros(shape, dtype, device) for _ in layers]
        self.values = [_zeros(shape, dtype, device) for _ in layers]

    @property
    def block_bytes(self) -> int:
        """Memory of a block, in all layers."""
        return sum(each.nbytes for each in (*self.keys, *self.values)) // self.num_blocks


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, take no memory before they are written; torch's own do at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
