"""What kernels ask of a paged cache before they read or write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider_kernels.triton_ops.configs import HEAD_DIMS, PAGE_SIZE
from outrider_kernels.triton_ops.launch import aligned, type_name


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's keys and values, checked, as pointers see them."""

    type: str
    """In Triton's words; "u8" holds the bits of e4m3."""
    keys: torch.Tensor
    values: torch.Tensor
    k_scales: torch.Tensor
    """Where there are none: any float32 tensor, and nobody reads it."""
    v_scales: torch.Tensor

    @staticmethod
    def check(
        dtype: torch.dtype,
        head_dim: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scales: torch.Tensor | None,
        v_scales: torch.Tensor | None,
    ) -> Cache:
        """For activations in dtype; ValueError unless all of it fits and lies as kernels read it.

        Caches are [num_blocks, PAGE_SIZE, kv_heads, head_dim], in dtype or in 8 bits; scales as in
        kv_scaled.py.
        """
        if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
            raise ValueError(f"keys are {list(k_cache.shape)} and values {list(v_cache.shape)}")
        if k_cache.shape[3] != head_dim or head_dim not in HEAD_DIMS:
            raise ValueError(
                f"heads of {head_dim} values and a cache of {list(k_cache.shape)}: both must be of "
                f"one size out of {HEAD_DIMS}"
            )
        if k_cache.shape[1] != PAGE_SIZE:
            raise ValueError(f"blocks of {k_cache.shape[1]} tokens, the kernels have {PAGE_SIZE}")
        for tensor in (k_cache, v_cache, k_scales, v_scales):
            if tensor is not None and (not tensor.is_contiguous() or aligned(tensor) is not tensor):
                raise ValueError("a cache must lie in one piece, from a multiple of 16 bytes on")
        if k_cache.dtype not in (torch.int8, torch.float8_e4m3fn):
            if k_cache.dtype != dtype:
                raise ValueError(f"a cache in {k_cache.dtype} does not fit activations in {dtype}")
            nothing = k_cache.new_empty(1, dtype=torch.float32)
            name = type_name(k_cache, "bf16", "fp16", "fp32")
            return Cache(name, k_cache, v_cache, nothing, nothing)
        if dtype == torch.float32:
            raise ValueError("a cache in 8 bits needs activations in bfloat16 or float16")
        for scales in (k_scales, v_scales):
            if scales is None or scales.shape != k_cache.shape[:3] or scales.dtype != torch.float32:
                raise ValueError("a cache in 8 bits needs float32 scales of each slot and KV head")
        assert k_scales is not None and v_scales is not None
        if k_cache.dtype == torch.int8:
            return Cache("i8", k_cache, v_cache, k_scales, v_scales)
        bits = torch.uint8
        return Cache("u8", k_cache.view(bits), v_cache.view(bits), k_scales, v_scales)
