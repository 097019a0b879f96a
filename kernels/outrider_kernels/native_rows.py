"""The small operations in C++, each in one pass over its rows: csrc/elementwise.h.

A step does not call them: it goes through the same code inside csrc/decoder.h. Here each can be had
by itself.
"""

from __future__ import annotations

import ctypes

import torch

from outrider_kernels.native_library import (
    AttentionShape,
    Library,
    NormJob,
    RotaryJob,
    SiluJob,
    native_cache,
)


def rms_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension.

    x is [rows, width] or [rows, parts, width]; weight is float32, [width] or [parts, width].
    ValueError for another shape.
    """
    num_rows, width = x.shape[0], x.shape[-1]
    parts = x.shape[1] if x.dim() == 3 else 1
    if weight.dtype != torch.float32 or weight.numel() != parts * width or x.dim() > 3:
        raise ValueError(f"weights of {list(weight.shape)} do not fit {list(x.shape)}")
    # Names keep copies alive until the call is over.
    wide, weight = library.widened(x), weight.contiguous()
    out = torch.empty(x.shape)
    job = NormJob(
        x=wide.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        parts=parts,
        width=width,
        num_threads=torch.get_num_threads(),
        eps=eps,
    )
    library.norm(library.kernels, ctypes.byref(job))
    return out.to(x.dtype)


def add_rms_norm(
    library: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to the residual, in place and rounded; the sum's norm. Both [rows, width]."""
    return rms_norm(library, residual.add_(x), weight, eps)


def silu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width], the gate first; [rows, width]."""
    wide = library.widened(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width))
    job = SiluJob(
        gate_up=wide.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        width=width,
        num_threads=torch.get_num_threads(),
    )
    library.silu(library.kernels, ctypes.byref(job))
    return out.to(gate_up.dtype)


def rotate_and_write(
    library: Library,
    queries_keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As `kv_write.rotate_and_write`; ValueError for a cache that is not of the keys' shape."""
    num_rows, num_rotated, head_dim = queries_keys.shape
    kv_heads = values.shape[1]
    heads = num_rotated - kv_heads
    shape = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    cache = native_cache(k_cache, v_cache, shape)
    if head_dim % 2:
        raise ValueError("heads must have two halves")
    if cos.shape[0] != num_rows or slots.dtype != torch.int64 or slots.shape != (num_rows,):
        raise ValueError(f"angles or slots do not fit {num_rows} rows")
    qkv = torch.cat([library.widened(queries_keys), library.widened(values)], 1)
    cos, signed_sin = cos.contiguous(), signed_sin.contiguous()
    positions, slots = torch.arange(num_rows), slots.contiguous()
    job = RotaryJob(
        shape=shape,
        cache=cache,
        qkv=qkv.data_ptr(),
        cos=cos.data_ptr(),
        signed_sin=signed_sin.data_ptr(),
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        num_rows=num_rows,
        num_threads=torch.get_num_threads(),
    )
    library.rotary(library.kernels, ctypes.byref(job))
    return qkv[:, :heads].to(queries_keys.dtype)
