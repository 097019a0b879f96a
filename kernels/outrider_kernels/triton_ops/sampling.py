"""Tokens from logits: filters, noise and the best of both, in a few passes over float32 rows.

Reference: `TokenChooser` in outrider/engine/sampling.py, equal in every token. Nothing as long as a
row is ever written. Blocks of a row find their best logit; one program a row then finds what its
filters keep (cuts.py). Then blocks draw: noise is made only where a block may still beat the row's
best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs_sampling import (
    BEST,
    CUT,
    DRAW,
    FINISH,
    MAX_VOCABULARY,
    VOCAB_BLOCK,
)
from outrider_kernels.triton_ops.cuts import cut_kernel
from outrider_kernels.triton_ops.launch import aligned, launch
from outrider_kernels.triton_ops.mass import weights_of
from outrider_kernels.triton_ops.noise import MAX_GUMBEL, gumbel_of, words_of
from outrider_kernels.triton_ops.scores import (
    best_found,
    best_of,
    is_kept,
    load_logits,
    scores_of,
)
from outrider_kernels.triton_ops.settings import (
    FIELDS,
    min_p_of,
    num_ids_of,
    position_of,
    seed_of,
    stream_of,
    temperature_of,
)

ROW_FIELDS = 4
"""Of a row's cut: best id or -1, key, id, and the mass of what is kept where it is asked for."""


@triton.jit(do_not_specialize=["width", "blocks"])
def best_kernel(
    logits,
    settings,
    block_best,
    block_id,
    width,
    blocks,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (row, block): its best logit, infinity where anything is not a number."""
    row, block = tl.program_id(0), tl.program_id(1)
    num_ids = num_ids_of(settings + row * 8)
    ids, values = load_logits(logits, row, block, width, num_ids, BLOCK, UNIT)
    values = tl.where(values == values, values, float("inf"))
    best, best_id = best_of(values, ids)
    tl.store(block_best + row * blocks + block, best)
    tl.store(block_id + row * blocks + block, best_id)


@triton.jit
def noise_of_one(seed, token, position, stream):
    """The noise of a single id."""
    first = token // 4 * 4
    four = gumbel_of(words_of(seed, first, position, stream, 4))
    return tl.sum(tl.where(tl.arange(0, 4) == token - first, four, 0.0), 0)


@triton.jit(do_not_specialize=["width", "blocks"])
def draw_kernel(
    logits,
    settings,
    block_best,
    block_id,
    row_best,
    cuts,
    width,
    blocks,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (row, block): the best of score + noise, in the place of the best logit."""
    row, block = tl.program_id(0), tl.program_id(1)
    of_row = settings + row * 8
    place = row * blocks + block
    best_id, temperature = tl.load(cuts + row * 4).to(tl.int32), temperature_of(of_row)
    noisy = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    if (best_id >= 0) & (temperature > 0.0):
        best, seed = tl.load(row_best + row), seed_of(of_row)
        position, stream = position_of(of_row), stream_of(of_row)
        bar = noise_of_one(seed, best_id, position, stream)
        top = scores_of(tl.load(block_best + place), best, temperature)
        if top + MAX_GUMBEL >= bar:
            cut_key = tl.load(cuts + row * 4 + 1).to(tl.int32)
            cut_id = tl.load(cuts + row * 4 + 2).to(tl.int32)
            ids, values = load_logits(logits, row, block, width, num_ids_of(of_row), BLOCK, UNIT)
            scores = scores_of(values, best, temperature)
            kept = is_kept(ids, scores, weights_of(scores), cut_key, cut_id, min_p_of(of_row))
            noise = gumbel_of(words_of(seed, block * BLOCK, position, stream, BLOCK))
            noisy, token = best_of(tl.where(kept, scores + noise, float("-inf")), ids)
    tl.store(block_best + place, noisy)
    tl.store(block_id + place, token)


@triton.jit(do_not_specialize=["blocks"])
def finish_kernel(block_best, block_id, row_best, cuts, tokens, blocks, BLOCKS: tl.constexpr):
    """Program: a row. What its blocks drew, or its best logit's id; -1 if there is none."""
    row = tl.program_id(0)
    best_id = tl.load(cuts + row * 4)
    noisy, token = best_found(block_best, block_id, row, blocks, BLOCKS)
    drawn = (best_id >= 0) & (noisy > float("-inf"))
    tl.store(tokens + row, tl.where(drawn, token.to(tl.int64), best_id))


def choose(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """A token for each row of float32 logits [rows, vocab], int64 [rows]; -1 for bad rows.

    A row is bad if it holds NaN or infinity or has no finite logit at all. settings are those of
    `settings_table`, on the logits' device. ValueError for another type, shape, or a vocabulary of
    more than MAX_VOCABULARY ids.
    """
    scan = Scan(logits, settings)
    tokens = torch.empty(len(settings), dtype=torch.int64, device=logits.device)
    scan.find_cuts()
    inputs = (scan.logits, scan.settings, *scan.found, *scan.rows)
    grid = (scan.num_rows, scan.blocks)
    launch(draw_kernel, grid, DRAW[scan.unit], *inputs, scan.width, scan.blocks)
    launch(finish_kernel, grid[:1], FINISH, *inputs[2:], tokens, scan.blocks)
    return tokens


class Scan:
    """Rows of logits in blocks, and what is found in them on the way to a token."""

    def __init__(self, logits: torch.Tensor, settings: torch.Tensor) -> None:
        """Checks what it is given; computes nothing yet."""
        num_rows, vocab = logits.shape
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits must be float32 in one piece, got {logits.dtype}")
        if settings.shape != (num_rows, FIELDS) or settings.dtype != torch.int64:
            raise ValueError(f"settings of {list(settings.shape)} do not fit {num_rows} rows")
        if not 0 < vocab <= MAX_VOCABULARY:
            raise ValueError(f"rows of {vocab} ids, from 1 to {MAX_VOCABULARY} are supported")
        self.logits, self.settings = aligned(logits), aligned(settings.contiguous())
        self.num_rows, self.blocks = num_rows, triton.cdiv(vocab, VOCAB_BLOCK)
        self.unit = 4 if vocab % 4 == 0 else 1
        self.width = vocab // self.unit
        new = self.logits.new_empty
        self.found = (
            new((num_rows, self.blocks), dtype=torch.float32),
            new((num_rows, self.blocks), dtype=torch.int32),
        )
        self.rows = (
            new(num_rows, dtype=torch.float32),
            new((num_rows, ROW_FIELDS), dtype=torch.int64),
        )

    def find_cuts(self) -> None:
        """Each row's best token and what its filters keep."""
        grid, numbers = (self.num_rows, self.blocks), (self.width, self.blocks)
        inputs = (self.logits, self.settings, *self.found)
        launch(best_kernel, grid, BEST[self.unit], *inputs, *numbers)
        launch(cut_kernel, grid[:1], CUT[self.unit], *inputs, *self.rows, *numbers)
