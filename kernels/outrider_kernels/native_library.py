"""The compiled library: its functions and their arguments, as csrc/kernels.h has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.native_build import Unavailable, find_library, instruction_sets

NATIVE_VERSION = 2
"""Raised with every change of a single bit of any result of the library."""

_COST_OF_A_THREAD = 1_000_000
"""Multiplications for which it pays to wake a thread, some 50 us of work."""


def _fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in numbers.split()),
    ]


class LinearJob(ctypes.Structure):
    """Arguments of `linear`."""

    _fields_ = _fields(
        "x weight bias out", "num_rows num_in num_out num_threads x_is_bf16 weight_type"
    )


class AttentionJob(ctypes.Structure):
    """Arguments of `attention`."""

    _fields_ = _fields(
        "q k_cache v_cache out tiles units blocks partials num_done",
        "q_stride num_units num_tokens num_rows heads kv_heads head_dim block_size"
        " num_threads is_bf16",
    )


class NormJob(ctypes.Structure):
    """Arguments of `norm`."""

    _fields_ = [
        *_fields("x weight out", "stride num_rows parts width num_threads is_bf16"),
        ("eps", ctypes.c_float),
    ]


class SiluJob(ctypes.Structure):
    """Arguments of `silu`."""

    _fields_ = _fields("gate_up out", "num_rows width num_threads is_bf16")


class RotaryJob(ctypes.Structure):
    """Arguments of `rotary`."""

    _fields_ = _fields(
        "queries_keys values cos signed_sin q k_cache v_cache slots",
        "qk_stride v_stride num_tokens num_rows heads kv_heads head_dim num_threads is_bf16",
    )


class PackJob(ctypes.Structure):
    """Arguments of `pack`."""

    _fields_ = _fields("weight strips", "num_in num_out is_bf16 weight_type")


class Library:
    """The kernels for one instruction set; calls release the interpreter's lock."""

    def __init__(self, dll: ctypes.CDLL, isa: str, kernels: int) -> None:
        self.isa = isa
        self.kernels = ctypes.c_void_p(kernels)
        self.linear: Callable[[Any, Any], None] = _function(dll, "outrider_linear")
        self.attention: Callable[[Any, Any], None] = _function(dll, "outrider_attention")
        self.norm: Callable[[Any, Any], None] = _function(dll, "outrider_norm")
        self.silu: Callable[[Any, Any], None] = _function(dll, "outrider_silu")
        self.rotary: Callable[[Any, Any], None] = _function(dll, "outrider_rotary")
        self.pack: Callable[[Any], None] = _function(dll, "outrider_pack", num_arguments=1)

    @staticmethod
    def is_bf16(*tensors: torch.Tensor) -> bool:
        """Whether all are bfloat16; ValueError unless all are that or all are float32 here."""
        dtype = tensors[0].dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the compiled kernels take float32 or bfloat16, not {dtype}")
        for tensor in tensors:
            if tensor.dtype != dtype or tensor.device.type != "cpu":
                raise ValueError(f"expected {dtype} on the CPU, got {tensor.dtype} elsewhere")
        return dtype == torch.bfloat16


def _function(dll: ctypes.CDLL, name: str, num_arguments: int = 2) -> Callable[..., None]:
    function = getattr(dll, name)
    function.argtypes = [ctypes.c_void_p] * num_arguments
    function.restype = None
    found: Callable[..., None] = function
    return found


@cache
def load_library(isa: str | None = None) -> Library:
    """The library, compiled if it must be, with the best instruction set or the named one.

    Raises Unavailable, with the reason; tries again at the next call.
    """
    path = find_library()
    try:
        dll = ctypes.CDLL(str(path))
        find = dll.outrider_kernels
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    for name in instruction_sets() if isa is None else [isa]:
        if kernels := find(name.encode()):
            return Library(dll, name, kernels)
    raise Unavailable(f"this processor has no {isa}")


def threads_for(cost: int) -> int:
    """Threads for so many multiplications: as many as torch has, fewer for little work."""
    return max(1, min(torch.get_num_threads(), cost // _COST_OF_A_THREAD))


def pointer(array: NDArray[np.int64]) -> int:
    """Where its numbers lie."""
    return array.ctypes.data
