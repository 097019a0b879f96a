"""Who owns which block of the paged cache: reference counts, a free list, and named contents.

    held       at least one block table has it
    cached     nobody has it, but it has a name and keeps its contents until it is needed
    free       nobody has it and nobody can ask for what it holds

A name is given to a block when it is full and its tokens are confirmed (`prefix.BlockChain` makes
names). Cached blocks count as free: they are taken back, least recently used first. Knows nothing
of tensors. Every operation either succeeds whole or changes nothing, so that a caller that gives up
halfway leaks nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16
"""Tokens of a block."""


class PoolExhausted(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """Blocks 0 to num_blocks - 1, each free or held by one or more block tables."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_refs = [0] * num_blocks
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of the free blocks, those whose contents can still be asked for."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; a shared one counts once."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference; PoolExhausted takes none."""
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            raise PoolExhausted(f"asked for {num_blocks} blocks, {self.num_free} are free")
        blocks = [self._take() for _ in range(num_blocks)]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these held or cached blocks."""
        for block in blocks:
            if not (
                0 <= block < self.num_blocks and (self._num_refs[block] or block in self._cached)
            ):
                raise ValueError(f"block {block} has no references and no name to share")
        for block in blocks:
            self._cached.pop(block, None)
            self._num_refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block; the last one makes it free or cached.

        Of blocks freed together the last one is the first to be taken back: a chain is only of use
        from its beginning.
        """
        counts = Counter(blocks)
        self._require_held(counts)
        for block in reversed(counts):
            self._num_refs[block] -= counts[block]
            if self._num_refs[block] > 0:
                continue
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def name(self, block: int, name: bytes) -> None:
        """What this held block contains from now on; a name that another block has stays there."""
        self._require_held(Counter([block]))
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks that contain these, from the first one on, up to the first that is not there."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these would stop being free if they were shared."""
        return sum(block in self._cached for block in blocks)

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
        free = Counter([*self._free, *self._cached])
        for block in range(self.num_blocks):
            num_refs = self._num_refs[block]
            if num_refs and block not in held:
                problems.append(f"block {block}: in no table, {num_refs} references")
            if free[block] != (0 if num_refs else 1):
                problems.append(f"block {block}: {num_refs} references, {free[block]} times free")
        for name, block in self._block_of.items():
            if self._name_of.get(block) != name:
                problems.append(f"block {block}: another name than the index says")
        for block in self._name_of.keys() & set(self._free):
            problems.append(f"block {block}: free and named")
        return problems

    def _take(self) -> int:
        """A free block, or else the cached one that was not used for the longest time."""
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._name_of.pop(block)]
        return block

    def _require_held(self, counts: Counter[int]) -> None:
        """Raise ValueError unless every block has the references that are asked of it."""
        for block, count in counts.items():
            if not 0 <= block < self.num_blocks or self._num_refs[block] < count:
                raise ValueError(f"block {block} does not have {count} references to give")
