"""Triton's interpreter made honest: bfloat16 as on a GPU, and only forms that the tables list.

The interpreter holds a bfloat16 as the bits of a uint16 and computes with those as if they were
numbers. Here products and conversions are right (round to nearest even), and any other arithmetic
in bfloat16 raises, which is the rule for kernels anyway.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from outrider_kernels.triton_ops import launch as launching
from outrider_kernels.triton_ops.configs import all_variants

_ONE_AT_A_TIME = Lock()
"""The interpreter has one grid for all threads."""


@cache
def install() -> None:
    """Change the interpreter of this process, before anything imports a module with kernels."""
    _install_bf16()
    _install_check()


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and getattr(dtype, "scalar", None) == tl.bfloat16


def _install_bf16() -> None:
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle: Any) -> Any:
        if not _is_bf16(handle):
            return handle
        return interpreter.TensorHandle(_to_float32(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        from_bf16, to_bf16 = _is_bf16(source), dtype.scalar == tl.bfloat16
        if from_bf16 and not to_bf16:
            wide = widened(source)
            return wide if dtype.scalar == tl.float32 else cast(self, wide, dtype)
        if to_bf16 and not from_bf16:
            return interpreter.TensorHandle(_to_bf16(source.data), tl.bfloat16)
        return cast(self, source, dtype)

    def guarded(operation: Any) -> Any:
        def run(self: Any, *operands: Any) -> Any:
            if any(_is_bf16(operand) for operand in operands):
                raise TypeError("arithmetic in bfloat16: convert to float32 first")
            return operation(self, *operands)

        return run

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.binary_op = guarded(builder.binary_op)
    builder.unary_op = guarded(builder.unary_op)


def _install_check() -> None:
    listed = set(all_variants())
    start = launching.launch

    def launch(kernel: Any, grid: Any, variant: Any, *args: Any) -> None:
        assert variant in listed, f"{variant.name} is in no table"
        assert kernel.__name__ == variant.kernel.split(".")[1]
        assert len(args) == len(variant.types)
        for (name, kind), value in zip(variant.types, args, strict=True):
            if isinstance(value, torch.Tensor):
                assert f"*{launching.TYPES[value.dtype]}" == kind, f"{name} is {value.dtype}"
                assert value.data_ptr() % launching.ALIGNMENT == 0, f"{name} is not aligned"
            else:
                assert kind == ("fp32" if isinstance(value, float) else "i32"), name
        # A GPU says nothing of an exp that overflows.
        with _ONE_AT_A_TIME, np.errstate(all="ignore"):
            start(kernel, grid, variant, *args)

    launching.launch = launch
