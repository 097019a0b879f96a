"""The implementations of each operation: plain torch, and C++ by instruction set."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from outrider_kernels import native_attention, native_rows
from outrider_kernels.linear import RowPlan
from outrider_kernels.native_build import Unavailable, instruction_sets
from outrider_kernels.native_library import Library, load_library
from outrider_kernels.ops import Ops, select_ops

IMPLEMENTATIONS = ("torch", *instruction_sets())


def library(isa: str) -> Library:
    """The compiled kernels for an instruction set; skips the test where they cannot be had."""
    try:
        return load_library(isa)
    except Unavailable as reason:
        pytest.skip(str(reason))


def ops_of(implementation: str) -> Ops:
    """The operations of one of IMPLEMENTATIONS."""
    plain = select_ops(torch.device("cpu"), RowPlan(), "torch")
    if implementation == "torch":
        return plain
    native = library(implementation)
    return Ops(
        name=implementation,
        linear=plain.linear,
        rms_norm=partial(native_rows.rms_norm, native),
        silu_mul=partial(native_rows.silu_mul, native),
        rotate_and_write=partial(native_rows.rotate_and_write, native),
        plan_attention=native_attention.plan_attention,
        paged_attention=partial(native_attention.paged_attention, native),
    )
