"""Exact matching on the device: drafts stand as long as they are the tokens that were chosen.

Reference: `choose_tokens` in outrider/engine/choosing.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs_sampling import ACCEPT
from outrider_kernels.triton_ops.launch import launch
from outrider_kernels.triton_ops.rounds import Rounds


@triton.jit(do_not_specialize=["width"])
def accept_kernel(sequences, drafts, chosen, tokens, counts, width, DRAFTS: tl.constexpr):
    """Program: a sequence. Tokens up to the first that is not the draft, then -1."""
    sequence = tl.program_id(0)
    first, num_drafts = tl.load(sequences + sequence * 2), tl.load(sequences + sequence * 2 + 1)
    place = tl.arange(0, 2 * DRAFTS)
    inside = place <= num_drafts
    mine = tl.load(chosen + first + place, mask=inside, other=-1)
    draft = tl.load(drafts + first + place, mask=inside, other=-1)
    differs = (place >= num_drafts) | (mine != draft) | (mine < 0)
    last = tl.min(tl.where(differs, place, 2 * DRAFTS), 0)
    to = tokens + sequence.to(tl.int64) * width + place
    tl.store(to, tl.where(place <= last, mine, -1), mask=place < width)
    tl.store(counts + sequence, last + 1)


def accept(chosen: torch.Tensor, rounds: Rounds) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact matching, given the tokens of `sampling.choose` for all rows, int64 [rows].

    Gives tokens int64 [sequences, 1 + MAX_DRAFTS], each sequence's up to the first that is not the
    draft, then -1; and how many they are, int32 [sequences]. The last of them is -1 if its row was
    bad. ValueError if the rows are not those of the rounds.
    """
    rounds.check(len(chosen))
    tokens, counts = rounds.outputs()
    inputs = (rounds.sequences, rounds.drafts, chosen.contiguous())
    launch(accept_kernel, (len(counts),), ACCEPT, *inputs, tokens, counts, tokens.shape[1])
    return tokens, counts
