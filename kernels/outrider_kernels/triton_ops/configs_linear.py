"""The forms of matrix products: what weights are, and how many rows a tile has."""

from __future__ import annotations

from itertools import product

from outrider_kernels.triton_ops.variant import Variant

GROUP = 32
"""Inputs, as outrider_kernels/quantise.py has it; matrices are padded to whole groups."""
KINDS = ("plain", "e4m3", "int8", "int8_rows", "int4")
"""Weights as they are, in e4m3 with a scale an output, in int8 or int4 in groups of inputs; with
"int8_rows" activations are rounded to int8 in groups too."""
WHOLE_KINDS = KINDS[:2]
INVARIANT_ROWS = 32
"""Rows of a tile of invariant mode, whatever a step has."""
TILE_ROWS = ((16, 32, 64), (16, 32, 64, 128))
"""Of kinds with groups, whose sums need more registers, and of the others."""
ROUND_GROUPS = 64
"""Groups of a row that one program rounds."""
_WEIGHTS = {"e4m3": "*u8", "int8": "*i8", "int8_rows": "*i8", "int4": "*u8"}


def _tile(kind: str, taken: str, rows: int) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile, warps and stages."""
    if taken == "fp32":
        return (32, 32, 4, 3) if kind in WHOLE_KINDS else (16, GROUP, 8, 3)
    if kind in WHOLE_KINDS:
        return (32, 128, 4, 4) if rows <= 32 else (64, 64, 4, 4) if rows == 64 else (128, 64, 8, 3)
    return (32, GROUP, 2, 4) if rows <= 32 else (64, GROUP, 4, 4)


def _linear(kind: str, taken: str, given: str, rows: int) -> Variant:
    outputs, inputs, num_warps, num_stages = _tile(kind, taken, rows)
    weights = _WEIGHTS.get(kind, f"*{taken}")
    is_whole = kind in WHOLE_KINDS
    types = [
        ("out", f"*{given}"),
        ("x", f"*{taken}"),
        *([] if is_whole else [("x_scales", "*fp32")]),
        ("weight", weights),
        ("scales", "*fp32") if is_whole else ("words", "*i32"),
        ("bias", "*fp32"),
        *((name, "i32") for name in ("num_rows", "num_out", "groups", "has_bias")),
    ]
    last = ("INPUTS", inputs) if is_whole else ("STAGES", num_stages)
    return Variant(
        "linear.whole_kernel" if is_whole else "linear.grouped_kernel",
        tuple(types),
        (("ROWS", rows), ("OUTPUTS", outputs), last, ("KIND", kind)),
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=255,
        copies_16_bytes=taken != "fp32",
    )


def _keys() -> list[tuple[str, str, str, int]]:
    def taken(kind: str, dtype: str) -> str:
        return "i8" if kind == "int8_rows" else dtype

    narrow = ("bf16", "fp16")
    return [
        *(
            (kind, taken(kind, dtype), dtype, rows)
            for kind, dtype in product(KINDS, narrow)
            for rows in TILE_ROWS[kind in WHOLE_KINDS]
        ),
        *((kind, taken(kind, "fp32"), "fp32", INVARIANT_ROWS) for kind in KINDS),
        *(("plain", dtype, "fp32", INVARIANT_ROWS) for dtype in narrow),
    ]


LINEAR = {key: _linear(*key) for key in _keys()}
"""(kind, type of the rows that it takes, type of the result, rows of a tile). float32 rows are for
tests; a float32 result of narrower rows is for logits."""

ROUND = {
    dtype: Variant(
        "linear.round_kernel",
        (("x", f"*{dtype}"), ("values", "*i8"), ("scales", "*fp32"), ("groups", "i32")),
        (("GROUPS", ROUND_GROUPS),),
        num_warps=4,
        fuse_multiply_add=False,
    )
    for dtype in ("bf16", "fp16", "fp32")
}
"""By the type of the activations."""


def linear_variants() -> list[Variant]:
    """All of the tables."""
    return [*LINEAR.values(), *ROUND.values()]
