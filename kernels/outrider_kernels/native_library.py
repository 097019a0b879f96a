"""The compiled library: its functions and their arguments, as csrc/kernels.h has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_kernels.kv_rows import kv_row_size
from outrider_kernels.native_build import Unavailable, find_library, runnable_sets

NATIVE_VERSION = 4
"""Raised with every change of a single bit of any result of the library."""
_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as csrc/kernels.h has them


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


def _numbers(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class AttentionPlan(ctypes.Structure):
    """What is the same in every layer."""

    _fields_ = [
        *_pointers("tiles units blocks num_done"),
        *_numbers("num_units num_partials block_size"),
    ]


class AttentionShape(ctypes.Structure):
    """Heads, and how wide one is."""

    _fields_ = _numbers("heads kv_heads head_dim")


class Cache(ctypes.Structure):
    """Keys and values of one layer."""

    _fields_ = [*_pointers("keys values"), *_numbers("type")]


class Weight(ctypes.Structure):
    """A packed matrix and its bias."""

    _fields_ = [*_pointers("data bias"), *_numbers("type num_in num_out")]


class LinearJob(ctypes.Structure):
    """Arguments of `linear`."""

    _fields_ = [("weight", Weight), *_pointers("x out"), *_numbers("num_rows num_threads")]


class AttentionJob(ctypes.Structure):
    """Arguments of `attention`."""

    _fields_ = [
        ("plan", AttentionPlan),
        ("shape", AttentionShape),
        ("cache", Cache),
        *_pointers("q out partials"),
        *_numbers("q_stride num_threads"),
    ]


class NormJob(ctypes.Structure):
    """Arguments of `norm`."""

    _fields_ = [
        *_pointers("x weight out"),
        *_numbers("num_rows parts width num_threads"),
        ("eps", ctypes.c_float),
    ]


class SiluJob(ctypes.Structure):
    """Arguments of `silu`."""

    _fields_ = [*_pointers("gate_up out"), *_numbers("num_rows width num_threads")]


class RotaryJob(ctypes.Structure):
    """Arguments of `rotary`."""

    _fields_ = [
        ("shape", AttentionShape),
        ("cache", Cache),
        *_pointers("qkv cos signed_sin positions slots"),
        *_numbers("num_rows num_threads"),
    ]


class DecoderLayer(ctypes.Structure):
    """A layer's weights."""

    _fields_ = [
        *_pointers("attention_norm mlp_norm query_key_norm"),
        *((name, Weight) for name in ("qkv", "attention_out", "gate_up", "down")),
    ]


class Decoder(ctypes.Structure):
    """A model's weights and shape."""

    _fields_ = [
        *_pointers("layers table final_norm"),
        ("head", Weight),
        *_pointers("cos signed_sin"),
        ("shape", AttentionShape),
        *_numbers("num_layers hidden table_is_bf16"),
        ("eps", ctypes.c_float),
    ]


class StepJob(ctypes.Structure):
    """Arguments of `step`."""

    _fields_ = [
        *_pointers("decoder caches token_ids positions slots logit_rows logits"),
        ("attention", AttentionPlan),
        *_numbers("num_rows num_logits num_threads"),
    ]


class PackJob(ctypes.Structure):
    """Arguments of `pack`."""

    _fields_ = [
        *_pointers("weight strips"),
        *_numbers("num_in num_out is_bf16 weight_type only_exact"),
    ]


class ChooseJob(ctypes.Structure):
    """Arguments of `choose`."""

    _fields_ = [*_pointers("choices"), *_numbers("num_choices num_threads")]


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
        self.pack: Callable[[Any], int] = dll.outrider_pack
        dll.outrider_pack.argtypes, dll.outrider_pack.restype = [ctypes.c_void_p], ctypes.c_int64
        self.step: Callable[[Any, Any], None] = _function(dll, "outrider_step")
        self.choose: Callable[[Any, Any], None] = _function(dll, "outrider_choose")
        self._set_spin = dll.outrider_set_spin
        self._set_spin.argtypes, self._set_spin.restype = [ctypes.c_int64], None

    def set_spin(self, microseconds: int) -> None:
        """How long a thread that waits may keep its core busy before it sleeps; 0: never.

        It does so for less time where that was in vain, as on cores that others use too. For all
        of the process that use this instruction set, from the next call on. ValueError for less
        than 0.
        """
        if microseconds < 0:
            raise ValueError(f"threads cannot wait for {microseconds} us")
        self._set_spin(microseconds)

    @staticmethod
    def is_bf16(tensor: torch.Tensor) -> bool:
        """Whether it is bfloat16; ValueError unless it is that or float32, on the CPU."""
        if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.device.type != "cpu":
            raise ValueError(
                f"the compiled kernels take float32 or bfloat16 on the CPU, not {tensor.dtype}"
            )
        return tensor.dtype == torch.bfloat16

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """x in float32 and in one piece, or itself; ValueError as for `is_bf16`."""
        return x.float().contiguous() if self.is_bf16(x) else x.contiguous()


def native_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, shape: AttentionShape) -> Cache:
    """A layer's [blocks, block_size, kv_heads, row] as the library takes it: pointers.

    A row is head_dim numbers, or what kv_rows.py says of int8.

    ValueError for tensors that do not lie as it reads them.
    """
    dtype = k_cache.dtype
    if dtype not in _CACHE_TYPES or v_cache.dtype != dtype:
        raise ValueError(
            f"a cache must be float32, bfloat16 or int8, not {dtype} and {v_cache.dtype}"
        )
    row = (shape.kv_heads, kv_row_size(shape.head_dim, dtype))
    if k_cache.shape[2:] != row or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"a cache of {list(k_cache.shape)} does not fit {shape.kv_heads} heads of "
            f"{shape.head_dim}"
        )
    for tensor in (k_cache, v_cache):
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError("the cache must lie in one piece, on the CPU")
    return Cache(keys=k_cache.data_ptr(), values=v_cache.data_ptr(), type=_CACHE_TYPES[dtype])


def _function(dll: ctypes.CDLL, name: str) -> Callable[..., None]:
    function = getattr(dll, name)
    function.argtypes = [ctypes.c_void_p] * 2
    function.restype = None
    found: Callable[..., None] = function
    return found


@cache
def load_library(isa: str | None = None) -> Library:
    """The library for the best instruction set or the named one, compiled if it must be.

    Raises Unavailable, with the reason; tries again at the next call.
    """
    for name in runnable_sets():
        if isa in (None, name) and (found := _load(name)):
            return found
    raise Unavailable(f"this processor has no {isa}")


def _load(isa: str) -> Library | None:
    """None where the processor does not have it after all."""
    try:
        dll = ctypes.CDLL(str(find_library(isa)))
        find = dll.outrider_kernels
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error
    find.argtypes, find.restype = [], ctypes.c_void_p
    kernels = find()
    return Library(dll, isa, kernels) if kernels else None


def pointer(array: NDArray[np.int64]) -> int:
    """Where its numbers lie."""
    return array.ctypes.data
