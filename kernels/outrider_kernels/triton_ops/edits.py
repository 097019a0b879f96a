"""Penalties, bias and banned ids, written into the few logits that they change.

Reference: the first half of `TokenChooser` in outrider/engine/sampling.py, equal in every bit. Each
row has its own history, a draft's row those of the drafts before it; so the host makes a list of
edits for each row, every id once, and one launch applies all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from outrider_kernels.choice import RowEdits
from outrider_kernels.triton_ops.configs_sampling import EDIT, EDIT_BLOCK
from outrider_kernels.triton_ops.launch import aligned, launch, send

FIELDS = 4
"""Of an edit: row, id, occurrences * 4 + banned * 2 + seen, and the bits of the bias."""


def edits_table(edits: RowEdits, row: int) -> NDArray[np.int32]:
    """A row's edits, [n, FIELDS], every id once."""
    seen = np.unique(np.array(edits.seen if edits.repetition != 1.0 else (), np.int64))
    counted = edits.output if edits.frequency or edits.presence else ()
    output, counts = np.unique(np.array(counted, np.int64), return_counts=True)
    biased = np.array(sorted(edits.bias), np.int64)
    banned = np.unique(np.array(list(edits.banned), np.int64))
    ids = np.unique(np.concatenate([seen, output, biased, banned]))
    table = np.zeros((len(ids), FIELDS), np.int32)
    table[:, 0], table[:, 1] = row, ids
    table[np.searchsorted(ids, seen), 2] += 1
    table[np.searchsorted(ids, banned), 2] += 2
    table[np.searchsorted(ids, output), 2] += 4 * counts.astype(np.int32)
    values = np.array([edits.bias[i] for i in biased.tolist()], np.float32)
    table[np.searchsorted(ids, biased), 3] = values.view(np.int32)
    return table


@triton.jit(do_not_specialize=["width", "num_edits"])
def edit_kernel(logits, edits, penalties, width, num_edits, BLOCK: tl.constexpr):
    """Program: a block of edits; no two of them are of one logit."""
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < num_edits
    row = tl.load(edits + edit * 4, mask=inside, other=0)
    place = row.to(tl.int64) * width + tl.load(edits + edit * 4 + 1, mask=inside, other=0)
    what = tl.load(edits + edit * 4 + 2, mask=inside, other=0)
    bias = tl.load(edits + edit * 4 + 3, mask=inside, other=0).to(tl.float32, bitcast=True)
    repetition = tl.load(penalties + row * 4)
    frequency = tl.load(penalties + row * 4 + 1)
    presence = tl.load(penalties + row * 4 + 2)
    x = tl.load(logits + place, mask=inside, other=0.0)
    penalised = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
    x = tl.where(what & 1 != 0, penalised, x)
    count = what >> 2
    counted = (x - count.to(tl.float32) * frequency) - presence
    x = tl.where(count > 0, counted, x) + bias
    x = tl.where(what & 2 != 0, float("-inf"), x)
    tl.store(logits + place, x, mask=inside)


def edit(logits: torch.Tensor, rows: Sequence[RowEdits]) -> None:
    """Apply edits to float32 logits [rows, vocab], in place, row by row.

    ValueError for another type, for other rows than there are, and for ids out of range.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be float32 in one piece, got {logits.dtype}")
    if len(rows) != logits.shape[0] or aligned(logits) is not logits:
        raise ValueError(f"{len(rows)} rows of edits do not fit {list(logits.shape)}")
    tables = [edits_table(row, i) for i, row in enumerate(rows)]
    edits = np.concatenate([np.zeros((0, FIELDS), np.int32), *tables])
    if len(edits) == 0:
        return
    if edits[:, 1].min() < 0 or edits[:, 1].max() >= logits.shape[1]:
        raise ValueError(f"an id is not one of the {logits.shape[1]} of a row")
    values = [(row.repetition, row.frequency, row.presence, 0.0) for row in rows]
    penalties = torch.tensor(values, dtype=torch.float32)
    launch(
        edit_kernel,
        (triton.cdiv(len(edits), EDIT_BLOCK),),
        EDIT,
        logits,
        send(torch.from_numpy(edits), logits.device),
        send(penalties, logits.device),
        logits.shape[1],
        len(edits),
    )
