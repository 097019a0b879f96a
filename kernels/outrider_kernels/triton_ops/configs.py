"""Every form in which a kernel may run, as tables that launchers look up and tests compile."""

from __future__ import annotations

from itertools import product

from outrider_kernels.triton_ops.variant import Variant

FLOATS = ("bf16", "fp16", "fp32")
UNITS = (8, 1)
"""What strides and widths are counted in: 8 values keep every access as wide as it can be."""

NORM_BLOCKS = tuple(64 << i for i in range(9))  # 64 to 16,384
"""Widths that a norm is compiled for; a row is one block."""
SILU_BLOCK = 1024


def _row_warps(block: int) -> int:
    """Eight values or more for each thread: one access of 16 bytes of bf16."""
    return min(16, max(1, block // 512))


def _norm(dtype: str, block: int, unit: int, adds: bool) -> Variant:
    pointers = ("x", "residual", "weight", "out")
    numbers = ("stride", "parts", "width")
    types = [(name, "*fp32" if name == "weight" else f"*{dtype}") for name in pointers]
    return Variant(
        "rows.rms_norm_kernel",
        (*types, *((name, "i32") for name in numbers), ("eps", "fp32")),
        (("BLOCK", block), ("UNIT", unit), ("ADDS", adds)),
        num_warps=_row_warps(block),
    )


NORM = {key: _norm(*key) for key in product(FLOATS, NORM_BLOCKS, UNITS, (False, True))}
"""(type, block, unit, whether it adds to the residual first)"""


def _silu(dtype: str, unit: int) -> Variant:
    return Variant(
        "rows.silu_mul_kernel",
        (("gate_up", f"*{dtype}"), ("out", f"*{dtype}"), ("width", "i32")),
        (("BLOCK", SILU_BLOCK), ("UNIT", unit)),
        num_warps=4,
    )


SILU = {key: _silu(*key) for key in product(FLOATS, UNITS)}
"""(type, unit)"""


def all_variants() -> list[Variant]:
    """All of the tables."""
    return [*NORM.values(), *SILU.values()]
