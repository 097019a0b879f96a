"""Choosing tokens in C++: the rows of all sequences of a step in one call (csrc/sampling.cpp)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch

from outrider_kernels.choice import Choice
from outrider_kernels.native_library import ChooseJob, Library

_CHOICE = struct.Struct("=8qQ3d")  # as in csrc/kernels.h
_COST_OF_AN_ID = 4
_COST_OF_A_SAMPLED_ID = 16
"""In multiplications: the second reads each logit twice and makes a random number of it."""
_COST_OF_THREADS = 2_000_000
"""For which it pays to wake the other ones, some 100 us of work."""


def choose(library: Library, choices: Sequence[Choice]) -> list[list[int]]:
    """The tokens of each choice, up to the first that is not the draft; filters as in the engine.

    -1 stands for a row that holds anything but numbers, or has no finite best. ValueError for rows
    that do not lie as the library reads them.
    """
    num_rows = [1 + len(choice.drafts) for choice in choices]
    tokens = np.array([id for each in choices for id in (*each.drafts, -1)], dtype=np.int64)
    packed = bytearray(_CHOICE.size * len(choices))
    first, cost, at = 0, 0, tokens.ctypes.data
    rows_of: torch.Tensor | None = None
    for i, choice in enumerate(choices):
        logits, rows = choice.logits, num_rows[i]
        if logits is not rows_of:  # mostly all are of one step
            rows_of, begin, height, width, stride = logits, *_rows(logits)
        if not 0 <= choice.first <= height - rows or not 0 < choice.num_ids <= width:
            raise ValueError(f"logits of {list(logits.shape)} do not fit {rows} rows")
        _CHOICE.pack_into(
            packed,
            i * _CHOICE.size,
            begin + 4 * choice.first * stride,
            at + 8 * first,
            rows,
            0,
            stride,
            choice.num_ids,
            choice.position,
            choice.top_k,
            choice.seed,
            choice.temperature,
            choice.top_p,
            choice.min_p,
        )
        first += rows
        each = _COST_OF_A_SAMPLED_ID if choice.temperature else _COST_OF_AN_ID
        cost += rows * choice.num_ids * each
    memory = (ctypes.c_char * len(packed)).from_buffer(packed)
    job = ChooseJob(
        choices=ctypes.addressof(memory),
        num_choices=len(choices),
        num_threads=torch.get_num_threads() if cost > _COST_OF_THREADS else 1,
    )
    library.choose(library.kernels, ctypes.byref(job))
    chosen = np.frombuffer(packed, dtype=np.int64)[3 :: _CHOICE.size // 8].tolist()
    found, row = tokens.tolist(), 0
    out = []
    for rows, count in zip(num_rows, chosen, strict=True):
        out.append(found[row : row + count])
        row += rows
    return out


def _rows(logits: torch.Tensor) -> tuple[int, int, int, int]:
    """Where rows lie, how many they are and how wide, and from one to the next."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(-1) != 1:
        raise ValueError(f"expected float32 rows on the CPU, got {logits.dtype} elsewhere")
    height, width = logits.shape
    return logits.data_ptr(), height, width, logits.stride(0)
