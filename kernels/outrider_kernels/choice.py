"""What is to be chosen in a step: one sequence's rows of logits, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What one row's logits are changed by before anything is chosen from them."""

    seen: Sequence[int] = ()
    """Prompt and output, for the repetition penalty."""
    output: Sequence[int] = ()
    """For the penalties that count."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Collection[int] = ()
    """Ids that end a text which is too short to end."""


class Choice(NamedTuple):
    """One sequence's rows of logits, and how its tokens are chosen from them."""

    logits: torch.Tensor
    """float32 [num_rows, at least num_ids], the values of a row next to each other."""
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
    first: int = 0
    """Which of the rows is its first one; it has 1 + len(drafts)."""
    edits: Sequence[RowEdits] = ()
    """Of each row, or none; for operations that choose on their device."""
    draft_probs: Sequence[Mapping[int, float]] = ()
    """What each draft was drawn from, if it is to stand by chance; for the same operations."""
