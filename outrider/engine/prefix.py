"""Names for the contents of full blocks: a hash chain over their tokens.

Two blocks have the same name exactly when everything from the beginning of the sequence to the end
of the block is the same, the salt included. So a name stands for keys and values, and tenants with
different salts share nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


class BlockChain:
    """The names of one sequence's full blocks, made as they fill up."""

    def __init__(self, salt: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(b"outrider prefix" + salt).digest()
        self._names: list[bytes] = []

    def names(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """One name for each full block among the first `num_tokens`; earlier ones are kept."""
        size = self._block_size
        while len(self._names) < num_tokens // size:
            start = len(self._names) * size
            parent = self._names[-1] if self._names else self._root
            block = array("I", token_ids[start : start + size]).tobytes()
            self._names.append(hashlib.sha256(parent + block).digest())
        return self._names[: num_tokens // size]
