"""The tensors behind the block pool: keys and values of every layer, by block.

    keys[layer], values[layer]    [num_blocks, block_size, kv_heads, head_dim]

In 8 bits there are scales too, where the operations want them (`Ops.scales_apart`): behind the
values they belong to, so that the last dimension is a little longer (outrider_kernels/kv_rows.py);
or beside them (outrider_kernels/kv_scaled.py):

    scales[layer]                 the keys' and the values', [num_blocks, block_size, kv_heads]

Who owns a block is the pool's matter; a slot that no sequence has written holds anything.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

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
        *,
        scales_apart: bool = False,
    ) -> None:
        row_size = config.head_dim if scales_apart else kv_row_size(config.head_dim, dtype)
        slots = (num_blocks, block_size, config.num_kv_heads)
        shape = (*slots, row_size)
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        layers = range(config.num_layers)
        self.keys = [_zeros(shape, dtype, device) for _ in layers]
        self.values = [_zeros(shape, dtype, device) for _ in layers]
        num_scales = 2 if scales_apart and dtype.itemsize == 1 else 0
        self.scales = [
            tuple(_zeros(slots, torch.float32, device) for _ in range(num_scales)) for _ in layers
        ]
        """Of each layer: keys' and values', float32; nothing where there are none apart."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them; a block is one piece of each."""
        return [*self.keys, *self.values, *(each for pair in self.scales for each in pair)]

    @property
    def block_bytes(self) -> int:
        """Memory of a block, in all layers."""
        return sum(each.nbytes for each in self.tensors) // self.num_blocks

    def check_blocks(self, blocks: Sequence[int]) -> None:
        """Raise ValueError for blocks that are not among its own; there is at least one."""
        if not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise ValueError("a block outside the cache")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, take no memory before they are written; torch's own do at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
