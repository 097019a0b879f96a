"""What one step forwards: the value object between policy and device. Knows nothing of torch.

Prefill, a chunk of it, decoding and verification are the same case: some tokens of a sequence, from
an absolute position on, with logits wanted for the last few of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's share of a step."""

    token_ids: list[int]
    """Forwarded this step: confirmed ones that are not computed yet, then draft tokens."""
    start: int
    """Absolute position of the first."""
    block_table: list[int]
    """Covers at least start + len(token_ids) slots."""
    num_logits: int
    """Logits wanted for the last rows; 0 for a chunk that does not end the prefix."""

    @property
    def end(self) -> int:
        """One past the last absolute position."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Batch:
    """All shares of a step, in the order in which their logits come back."""

    items: list[BatchItem] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded."""
        return sum(len(item.token_ids) for item in self.items)

    @property
    def num_logits(self) -> int:
        """Rows of logits that come back."""
        return sum(item.num_logits for item in self.items)
