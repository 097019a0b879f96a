"""Every form in which a kernel may run, as tables that launchers look up and tests compile."""

from __future__ import annotations

from itertools import product

from outrider_kernels.triton_ops.configs_linear import linear_variants
from outrider_kernels.triton_ops.configs_sampling import sampling_variants
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


UNALIGNED_BLOCK = 1024
"""For all widths and strides that are no multiple of 8: no real model has any."""
_BLOCKS = (*((block, 8) for block in NORM_BLOCKS), (UNALIGNED_BLOCK, 1))
NORM = {
    (dtype, *block, adds): _norm(dtype, *block, adds)
    for dtype, block, adds in product(FLOATS, _BLOCKS, (False, True))
}
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


PAGE_SIZE = 16
"""Tokens of a block of the cache."""
KEY_TILE = 64
"""Keys that a step of attention's loop takes at most; splits are multiples of it."""
INVARIANT_SPLIT = 512
"""Keys of a split in work.py's invariant mode, a multiple of KEY_TILE."""
HEAD_DIMS = (16, 32, 64, 80, 96, 128)
"""16 and 32 in float32 only: models of tests."""
BLOCK_ROWS = (16, 32, 64, 128)
"""Rows of a tile: (token, head of the group) pairs. Only the first two in float32, whose products
need many registers."""
CACHES = {"bf16": "plain", "fp16": "plain", "fp32": "plain", "i8": "int8", "u8": "e4m3"}


def _attention(dtype: str, cache: str, head_dim: int, block_m: int) -> Variant:
    types = [
        ("q", f"*{dtype}"),
        ("k_cache", f"*{cache}"),
        ("v_cache", f"*{cache}"),
        ("k_scales", "*fp32"),
        ("v_scales", "*fp32"),
        ("out", f"*{dtype}"),
        ("partials", "*fp32"),
        ("partial_logs", "*fp32"),
        ("units", "*i32"),
        ("blocks", "*i32"),
        ("group", "i32"),
        ("kv_heads", "i32"),
        ("scale_log2", "fp32"),
    ]
    padded = 1 << (head_dim - 1).bit_length()
    # What keeps sums, weights and the addresses of the next keys in registers on every chip.
    is_wide = dtype == "fp32" or block_m * padded >= (64 if cache == dtype else 32) * 128
    tile = 16 if dtype == "fp32" else 32 if block_m * padded >= 128 * 128 else KEY_TILE
    constants = (
        ("HEAD_DIM", head_dim),
        ("PADDED_DIM", padded),
        ("PAGE", PAGE_SIZE),
        ("BLOCK_M", block_m),
        ("TILE", tile),
        ("CACHE", CACHES[cache]),
    )
    return Variant(
        "attention.attention_kernel",
        tuple(types),
        constants,
        num_warps=8 if is_wide else 4,
        # With a limit, large tiles that widen 8 bits spill; without one, some of the others do.
        max_registers=255 if cache == dtype or block_m < 64 else None,
        copies_16_bytes=head_dim >= 64,
    )


def _attention_keys() -> list[tuple[str, str, int, int]]:
    wide = [
        (dtype, cache, head_dim, rows)
        for dtype in ("bf16", "fp16")
        for cache in (dtype, "i8", "u8")
        for head_dim in HEAD_DIMS[2:]
        for rows in BLOCK_ROWS
    ]
    return [*wide, *(("fp32", "fp32", d, rows) for d in HEAD_DIMS for rows in BLOCK_ROWS[:2])]


ATTENTION = {key: _attention(*key) for key in _attention_keys()}
"""(type, type of the cache, head size, rows of a tile)"""


def _merge(dtype: str, head_dim: int) -> Variant:
    pointers = [("partials", "*fp32"), ("partial_logs", "*fp32"), ("out", f"*{dtype}")]
    padded = 1 << (head_dim - 1).bit_length()
    return Variant(
        "attention.merge_kernel",
        (*pointers, ("merges", "*i32"), ("heads", "i32")),
        (("HEAD_DIM", head_dim), ("PADDED_DIM", padded)),
        num_warps=1,
    )


MERGE = {key: _merge(*key) for key in product(FLOATS, HEAD_DIMS)}
"""(type, head size)"""


HEADS_BLOCK = 8
"""Heads of a row that one program rotates and writes."""


def _rotary(dtype: str, cache: str, head_dim: int) -> Variant:
    types = [
        ("queries_keys", f"*{dtype}"),
        ("values", f"*{dtype}"),
        ("cos", "*fp32"),
        ("signed_sin", "*fp32"),
        ("slots", "*i64"),
        ("q", f"*{dtype}"),
        ("k_cache", f"*{cache}"),
        ("v_cache", f"*{cache}"),
        ("k_scales", "*fp32"),
        ("v_scales", "*fp32"),
    ]
    numbers = ("qk_stride", "v_stride", "num_tokens", "heads", "kv_heads")
    padded = 1 << (head_dim - 1).bit_length()
    constants = (
        ("HEAD_DIM", head_dim),
        ("PADDED_DIM", padded),
        ("HEADS", HEADS_BLOCK),
        ("CACHE", CACHES[cache]),
    )
    return Variant(
        "rotary_write.rotary_write_kernel",
        (*types, *((name, "i32") for name in numbers)),
        constants,
        num_warps=max(1, padded // 32),
        fuse_multiply_add=False,
    )


ROTARY = {key: _rotary(*key) for key in dict.fromkeys(key[:3] for key in ATTENTION)}
"""(type, type of the cache, head size)"""


SPREAD_BLOCK = 32
"""Rows, units and merges of a program, and tiles that it looks at together."""
_SPREAD_READS = ("tiles", "blocks", "ids", "wanted")
_SPREAD_WIDE = ("wide_ids", "positions", "slots", "wide_wanted")
SPREAD = Variant(
    "spread.spread_kernel",
    (
        *((name, "*i32") for name in _SPREAD_READS),
        *((name, "*i64") for name in _SPREAD_WIDE),
        *((name, "*i32") for name in ("units", "merges")),
        *((name, "i32") for name in ("num_rows", "num_units", "num_tiles")),
    ),
    (("PAGE", PAGE_SIZE), ("SPLIT", INVARIANT_SPLIT), ("BLOCK", SPREAD_BLOCK)),
    num_warps=1,
)


def all_variants() -> list[Variant]:
    """All of the tables."""
    tables = (NORM, SILU, ROTARY, ATTENTION, MERGE)
    own = [variant for table in tables for variant in table.values()]
    return [*own, SPREAD, *linear_variants(), *sampling_variants()]
