"""Choosing tokens in C++: the rows of all sequences of a step in one call (csrc/sampling.h)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider_kernels.native_library import ChooseJob, Library

_CHOICE = struct.Struct("=8qQ3d")  # as in csrc/kernels.h
_COST_OF_AN_ID = 4
_COST_OF_A_SAMPLED_ID = 16
"""In multiplications: the second reads each logit twice and makes a random number of it."""
_COST_OF_THREADS = 2_000_000
"""For which it pays to wake the other ones, some 100 us of work."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence's rows of logits, and how its tokens are chosen from them."""

    logits: torch.Tensor
    """float32 [1 + len(drafts), vocab] on the CPU, the values of a row next to each other."""
    num_ids: int
    """Ids from here on are padding of the logits and are never chosen."""
    position: int
    """Of the first row's token."""
    drafts: Sequence[int]
    """What the rows but the last must give for the next one to count."""
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def choose(library: Library, choices: Sequence[Choice]) -> list[list[int]]:
    """The tokens of each choice, up to the first that is not the draft; filters as in the engine.

    -1 stands for a row that holds anything but numbers, or has no finite best. ValueError for rows
    that do not lie as the library reads them.
    """
    num_rows = [1 + len(choice.drafts) for choice in choices]
    tokens = np.full(sum(num_rows), -1, dtype=np.int64)
    packed = bytearray(_CHOICE.size * len(choices))
    first, cost = 0, 0
    for i, choice in enumerate(choices):
        logits, rows = choice.logits, num_rows[i]
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(-1) != 1:
            raise ValueError(f"expected float32 rows on the CPU, got {logits.dtype} elsewhere")
        if logits.shape[0] != rows or not 0 < choice.num_ids <= logits.shape[1]:
            raise ValueError(f"logits of {list(logits.shape)} do not fit {rows} rows")
        tokens[first : first + rows - 1] = choice.drafts
        _CHOICE.pack_into(
            packed,
            i * _CHOICE.size,
            logits.data_ptr(),
            tokens.ctypes.data + 8 * first,
            rows,
            0,
            logits.stride(0),
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
