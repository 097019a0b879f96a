"""One text on its way: its tokens and two counters. Knows nothing of scheduling or tensors.

There are no phases. A step forwards `token_ids[num_computed:]` and then raises `num_computed`;
rolling back rejected draft tokens, or preempting, is lowering it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sequence:
    """Confirmed tokens and where their keys and values lie."""

    token_ids: list[int]
    """Confirmed tokens: the prompt, then what was generated."""
    prompt_len: int
    """How many of them are the prompt."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    block_table: list[int] = field(default_factory=list)
    """Blocks of the cache, in order of position; owned through the pool."""

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Confirmed tokens after the prompt."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Confirmed tokens that a step has yet to forward."""
        return len(self.token_ids) - self.num_computed
