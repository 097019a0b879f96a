"""The forms of the kernels that choose tokens: logits are float32, and few shapes matter."""

from __future__ import annotations

from outrider_kernels.triton_ops.variant import Variant

VOCAB_BLOCK = 2048
"""Ids of a program: 16 of each thread."""
MAX_BLOCKS = 256
"""Blocks of a row, so that one program holds what all of them found."""
MAX_VOCABULARY = MAX_BLOCKS * VOCAB_BLOCK  # 524,288
MAX_DRAFTS = 64
"""Of one sequence, the limit of its service."""
SPARSE_ENTRIES = 64
"""Of a draft's distribution, as on the wire."""
EDIT_BLOCK = 256
"""Edits of a program."""
WARPS = 4

Types = tuple[tuple[str, str], ...]


def _variant(
    kernel: str, types: Types, constants: tuple[tuple[str, int | bool], ...], num_warps: int = WARPS
) -> Variant:
    return Variant(
        kernel, types, constants, num_warps=num_warps, num_stages=1, fuse_multiply_add=False
    )


_BLOCK = ("BLOCK", VOCAB_BLOCK)
_ROWS: Types = (("logits", "*fp32"), ("settings", "*i64"))
_NUMBERS: Types = (("width", "i32"), ("blocks", "i32"))
_FOUND: Types = (("block_best", "*fp32"), ("block_id", "*i32"))
_CUTS: Types = (("row_best", "*fp32"), ("cuts", "*i64"))

GUMBEL = _variant(
    "noise.gumbel_kernel",
    (
        ("seed", "*i64"),
        ("out", "*fp32"),
        ("position", "i32"),
        ("stream", "i32"),
        ("num_ids", "i32"),
    ),
    (_BLOCK,),
)
EDIT = _variant(
    "edits.edit_kernel",
    (
        ("logits", "*fp32"),
        ("edits", "*i32"),
        ("penalties", "*fp32"),
        ("width", "i32"),
        ("num_edits", "i32"),
    ),
    (("BLOCK", EDIT_BLOCK),),
)
BEST = {
    unit: _variant("sampling.best_kernel", (*_ROWS, *_FOUND, *_NUMBERS), (_BLOCK, ("UNIT", unit)))
    for unit in (4, 1)
}
"""By the unit that the width of rows is counted in: 4 values are 16 bytes."""
CUT = {
    unit: _variant(
        "cuts.cut_kernel",
        (*_ROWS, *_FOUND, *_CUTS, *_NUMBERS),
        (_BLOCK, ("BLOCKS", MAX_BLOCKS), ("UNIT", unit)),
        num_warps=8,
    )
    for unit in (4, 1)
}
DRAW = {
    unit: _variant(
        "sampling.draw_kernel", (*_ROWS, *_FOUND, *_CUTS, *_NUMBERS), (_BLOCK, ("UNIT", unit))
    )
    for unit in (4, 1)
}
FINISH = _variant(
    "sampling.finish_kernel",
    (*_FOUND, *_CUTS, ("tokens", "*i64"), ("blocks", "i32")),
    (("BLOCKS", MAX_BLOCKS),),
)
_ROUNDS: Types = (("sequences", "*i32"), ("drafts", "*i64"))
_DRAFTED: Types = (("draft_ids", "*i32"), ("draft_probs", "*fp32"), ("stands", "*i32"))
_OUT: Types = (("tokens", "*i64"), ("counts", "*i32"), ("width", "i32"))
_DRAFTS, _ENTRIES = ("DRAFTS", MAX_DRAFTS), ("ENTRIES", SPARSE_ENTRIES)

ACCEPT = _variant(
    "matching.accept_kernel", (*_ROUNDS, ("chosen", "*i64"), *_OUT), (_DRAFTS,), num_warps=1
)
JUDGE = {
    unit: _variant(
        "judge.judge_kernel",
        (*_ROWS, *_CUTS, ("drafts", "*i64"), *_DRAFTED, *_NUMBERS),
        (_BLOCK, _ENTRIES, ("UNIT", unit)),
        num_warps=8,
    )
    for unit in (4, 1)
}
REPLACE = {
    unit: _variant(
        "rejection.replace_kernel",
        (*_ROWS, *_FOUND, *_CUTS, *_ROUNDS, *_DRAFTED, *_NUMBERS),
        (_BLOCK, _DRAFTS, _ENTRIES, ("UNIT", unit)),
        num_warps=8,
    )
    for unit in (4, 1)
}
SETTLE = _variant(
    "rejection.settle_kernel",
    (*_FOUND, ("cuts", "*i64"), *_ROUNDS, ("stands", "*i32"), *_OUT, ("blocks", "i32")),
    (("BLOCKS", MAX_BLOCKS), _DRAFTS),
)


def sampling_variants() -> list[Variant]:
    """All of the tables."""
    by_unit = [v for table in (BEST, CUT, DRAW, JUDGE, REPLACE) for v in table.values()]
    return [GUMBEL, EDIT, FINISH, ACCEPT, SETTLE, *by_unit]
