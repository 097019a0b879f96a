"""The implementations of each operation: plain torch, and C++ by instruction set."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels.native_build import Unavailable, instruction_sets
from outrider_kernels.native_library import Library, load_library
from outrider_kernels.ops import Ops, native_ops, select_ops

IMPLEMENTATIONS = ("torch", *instruction_sets())


def library(isa: str) -> Library:
    """The compiled kernels for an instruction set; skips the test where they cannot be had."""
    try:
        return load_library(isa)
    except Unavailable as reason:
        pytest.skip(str(reason))


def ops_of(implementation: str, *, rounding: str | None = None) -> Ops:
    """The operations of one of IMPLEMENTATIONS; rounding as for `select_ops`."""
    if implementation == "torch":
        return select_ops(torch.device("cpu"), "torch", rounding=rounding)
    return native_ops(library(implementation), rounding=rounding)
