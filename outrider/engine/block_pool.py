"""Who owns which block of the paged cache: a free list and reference counts.

Knows nothing of tensors or of what a block holds. Every operation either succeeds whole or changes
nothing, so that a caller that gives up halfway leaks nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence


class PoolExhausted(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """Blocks 0 to num_blocks - 1, each free or held by one or more block tables."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._free = deque(range(num_blocks))
        self._num_refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; a shared one counts once."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference; PoolExhausted takes none."""
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > len(self._free):
            raise PoolExhausted(f"asked for {num_blocks} blocks, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these held blocks."""
        self._require_held(Counter(blocks), at_least=1)
        for block in blocks:
            self._num_refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block; the last one makes it free."""
        counts = Counter(blocks)
        self._require_held(counts)
        for block, count in counts.items():
            self._num_refs[block] -= count
            if self._num_refs[block] == 0:
                self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, given every table in use; empty when all is well. Changes nothing."""
        problems = []
        held: Counter[int] = Counter()
        for table in block_tables:
            held.update(table)
        for block, count in sorted(held.items()):
            if not 0 <= block < self.num_blocks:
                problems.append(f"block {block} stands in a table but not in the pool")
            elif count != self._num_refs[block]:
                problems.append(
                    f"block {block}: {count} tables, {self._num_refs[block]} references"
                )
        free = Counter(self._free)
        for block in range(self.num_blocks):
            num_refs = self._num_refs[block]
            if num_refs and block not in held:
                problems.append(f"block {block}: in no table, {num_refs} references")
            if free[block] != (0 if num_refs else 1):
                problems.append(f"block {block}: {num_refs} references, {free[block]} times free")
        return problems

    def _require_held(self, counts: Counter[int], *, at_least: int = 0) -> None:
        """Raise ValueError unless every block has the references that are asked of it."""
        for block, count in counts.items():
            wanted = at_least or count
            if not 0 <= block < self.num_blocks or self._num_refs[block] < wanted:
                raise ValueError(f"block {block} does not have {wanted} references to give")
