"""A draft's distribution in a few entries: what rejection mode checks a draft against.

Pure Python: it travels, so services without torch hold it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SPARSE_ENTRIES = 64
"""Most entries of one distribution, on the wire and off it."""
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """A truncated distribution: what it does not name has probability 0."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    @staticmethod
    def certain(token_id: int) -> SparseProbs:
        """Of a proposer that would always have said the same."""
        return SparseProbs((token_id,), (1.0,))

    def of(self, token_id: int) -> float:
        """The probability of a token."""
        return self.probs[self.ids.index(token_id)] if token_id in self.ids else 0.0

    @property
    def is_valid(self) -> bool:
        """It is a distribution, within the limits."""
        if not 0 < len(self.ids) <= MAX_SPARSE_ENTRIES or len(self.ids) != len(self.probs):
            return False
        if len(set(self.ids)) < len(self.ids) or not all(0 <= p <= 2 for p in self.probs):
            return False  # the comparison catches NaN as well
        return math.fabs(math.fsum(self.probs) - 1) <= _SUM_TOLERANCE
