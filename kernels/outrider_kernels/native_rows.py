"""The small operations in C++, each in one pass over its rows: csrc/elementwise.h."""

from __future__ import annotations

import ctypes

import torch

from outrider_kernels.native_library import Library, NormJob, RotaryJob, SiluJob, threads_for

_COST_OF_A_VALUE = 16
"""Of any of these operations, in multiplications: they wait for memory."""


def rms_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension.

    x is [rows, width], or [rows, parts, width] with rows any distance apart; weight is float32,
    [width] or [parts, width]. ValueError for another shape.
    """
    num_rows, width = x.shape[0], x.shape[-1]
    parts = x.shape[1] if x.dim() == 3 else 1
    if weight.dtype != torch.float32 or weight.numel() != parts * width or x.dim() > 3:
        raise ValueError(f"weights of {list(weight.shape)} do not fit {list(x.shape)}")
    # Names keep copies alive until the call is over.
    x, weight = _with_dense_rows(x), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    job = NormJob(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        stride=x.stride(0),
        num_rows=num_rows,
        parts=parts,
        width=width,
        num_threads=threads_for(out.numel() * _COST_OF_A_VALUE),
        is_bf16=library.is_bf16(x),
        eps=eps,
    )
    library.norm(library.kernels, ctypes.byref(job))
    return out


def silu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width], the gate first; [rows, width]."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype)
    job = SiluJob(
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        width=width,
        num_threads=threads_for(out.numel() * _COST_OF_A_VALUE),
        is_bf16=library.is_bf16(gate_up),
    )
    library.silu(library.kernels, ctypes.byref(job))
    return out


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
    if k_cache.shape[2:] != (kv_heads, head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(f"a cache of {list(k_cache.shape)} does not fit {kv_heads} heads")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or head_dim % 2:
        raise ValueError("the cache must lie in one piece, and heads must have two halves")
    if cos.shape[0] < num_rows or slots.dtype != torch.int64 or slots.shape[0] > num_rows:
        raise ValueError(f"angles or slots do not fit {num_rows} rows")
    queries_keys, values = _with_dense_rows(queries_keys), _with_dense_rows(values)
    cos, signed_sin, slots = cos.contiguous(), signed_sin.contiguous(), slots.contiguous()
    q = torch.empty((num_rows, heads, head_dim), dtype=queries_keys.dtype)
    job = RotaryJob(
        queries_keys=queries_keys.data_ptr(),
        values=values.data_ptr(),
        cos=cos.data_ptr(),
        signed_sin=signed_sin.data_ptr(),
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        slots=slots.data_ptr(),
        qk_stride=queries_keys.stride(0),
        v_stride=values.stride(0),
        num_tokens=slots.shape[0],
        num_rows=num_rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_threads=threads_for(num_rows * num_rotated * head_dim * _COST_OF_A_VALUE),
        is_bf16=library.is_bf16(queries_keys, values, k_cache, v_cache),
    )
    library.rotary(library.kernels, ctypes.byref(job))
    return q


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if the values of a row do not lie next to each other."""
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()
