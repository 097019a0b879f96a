"""How wide a row of a cache in 8 bits is: what it holds of one token and KV head. Needs no torch.

Scales stand behind the values in the row (kv_rows.py), or apart, one a row (kv_scaled.py): which of
both, the operations say (`Ops.scales_apart`).
"""

from __future__ import annotations

KV_GROUP = 32
"""Values next to each other with one scale in an int8 cache, as csrc/kernels.h has it."""
_SCALE_BYTES = 2
_APART_SCALE_BYTES = 4


def num_groups(head_dim: int) -> int:
    """Scales of a row."""
    return -(-head_dim // KV_GROUP)


def int8_row_bytes(head_dim: int) -> int:
    """Of a row in int8: its values and its scales."""
    return head_dim + _SCALE_BYTES * num_groups(head_dim)


def apart_row_bytes(head_dim: int) -> int:
    """Of a row in int8 or e4m3 and its scale in another tensor."""
    return head_dim + _APART_SCALE_BYTES
