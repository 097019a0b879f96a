"""The tensors behind the block pool: keys and values of every layer, by block.

    keys[layer], values[layer]    [num_blocks, block_size, kv_heads, head_dim]

Who owns a block is the pool's matter; a slot that no sequence has written holds anything.
"""

from __future__ import annotations

import torch

from outrider.engine.config import ModelConfig


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
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        # One tensor a layer: zeros are not backed by memory before they are written.
        layers = range(config.num_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
