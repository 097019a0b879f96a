"""How tokens are chosen, row by row, in one piece of memory that is copied to the device once.

A row of the table is FIELDS int64: seed, position, top_k, and the bits of top_p (float64),
temperature and min_p (float32), then the number of ids and the noise's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from outrider_kernels.noise import Stream

FIELDS = 8
_LEAST_TEMPERATURE = 1e-30
"""As in the engine: below it a division could give 0 / 0, and the result is the same."""
_TABLE = np.dtype(
    [
        ("seed", "<u8"),
        ("position", "<i8"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("_1", "<i4"),
        ("min_p", "<f4"),
        ("_2", "<i4"),
        ("num_ids", "<i8"),
        ("stream", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Of one row of logits; filters as in the engine's sampling."""

    position: int
    """Of the token that the row gives."""
    num_ids: int
    """Ids from here on are padding of the logits and are never chosen."""
    seed: int = 0
    temperature: float = 1.0
    """0 picks the best token."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stream: int = Stream.EXACT


def settings_table(rows: Sequence[RowSettings]) -> torch.Tensor:
    """int64 [rows, FIELDS] on the CPU."""
    table = np.zeros(len(rows), dtype=_TABLE)
    for i, row in enumerate(rows):
        temperature = max(row.temperature, _LEAST_TEMPERATURE) if row.temperature else 0.0
        top_k = row.top_k if row.top_k < row.num_ids else 0
        entry = (row.seed, row.position, top_k, row.top_p, temperature, 0, row.min_p, 0)
        table[i] = (*entry, row.num_ids, row.stream)
    return torch.from_numpy(table.view(np.int64).reshape(len(rows), FIELDS))


@triton.jit
def seed_of(row):
    """The functions here take a pointer to a row's first field."""
    return tl.load(row)


@triton.jit
def position_of(row):
    """int32."""
    return tl.load(row + 1).to(tl.int32)


@triton.jit
def top_k_of(row):
    """int64; 0 keeps all."""
    return tl.load(row + 2)


@triton.jit
def top_p_of(row):
    """float64."""
    return tl.load(row + 3).to(tl.float64, bitcast=True)


@triton.jit
def temperature_of(row):
    """float32; 0 picks the best."""
    return tl.load(row + 4).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def min_p_of(row):
    """float32."""
    return tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def num_ids_of(row):
    """int32."""
    return tl.load(row + 6).to(tl.int32)


@triton.jit
def stream_of(row):
    """int32."""
    return tl.load(row + 7).to(tl.int32)
