"""Sequences in a paged cache, for tests of attention: odd shapes, and poison where nobody wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider_kernels.kv_rows import round_kv, widen_kv
from outrider_kernels.kv_write import write_kv
from outrider_kernels.reference import reference_paged_attention
from tests.support.implementations import ops_of

BLOCK_SIZE = 16
NUM_BLOCKS = 96


@dataclass
class Case:
    """Sequences in a cache whose unused slots hold NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    query_lens: list[int]
    starts: list[int]
    block_tables: list[list[int]]
    implementation: str

    def attend(self, num_rows: int | None = None) -> torch.Tensor:
        """The op's output for the tokens, with q padded to num_rows."""
        return self.attend_all(num_rows)[: len(self.q)]

    def attend_all(self, num_rows: int | None = None, padding: float = 0.0) -> torch.Tensor:
        """The same with the rows of the padding."""
        num_tokens, num_heads, head_dim = self.q.shape
        shape = (max(0, (num_rows or 0) - num_tokens), num_heads, head_dim)
        q = torch.cat([self.q, self.q.new_full(shape, padding)])
        ops = ops_of(self.implementation)
        plan = ops.plan_attention(
            self.query_lens,
            self.starts,
            self.block_tables,
            block_size=BLOCK_SIZE,
            num_heads=num_heads,
            kv_heads=self.k_cache.shape[2],
            num_rows=q.shape[0],
        )
        return ops.paged_attention(q, self.k_cache, self.v_cache, plan)

    def reference(self) -> torch.Tensor:
        """The truth, about what the cache holds."""
        k_cache, v_cache = self.k_cache, self.v_cache
        if k_cache.dtype == torch.int8:
            k_cache, v_cache = (widen_kv(each, self.q.shape[2]) for each in (k_cache, v_cache))
        return reference_paged_attention(
            self.q, k_cache, v_cache, self.query_lens, self.starts, self.block_tables
        )

    def in_int8(self) -> Case:
        """The same with the cache rounded; what was NaN has scales that are."""
        return replace(self, k_cache=round_kv(self.k_cache), v_cache=round_kv(self.v_cache))

    def to(self, dtype: torch.dtype) -> Case:
        """The same in another precision of queries and cache."""
        q, k_cache, v_cache = (each.to(dtype) for each in (self.q, self.k_cache, self.v_cache))
        return replace(self, q=q, k_cache=k_cache, v_cache=v_cache)


def make_case(
    shares: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    implementation: str,
) -> Case:
    """Sequences of (start, query_len) with scattered blocks."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = []
    for start, query_len in shares:
        num_keys = start + query_len
        table = [free.pop() for _ in range(-(-num_keys // BLOCK_SIZE))]
        slots = torch.tensor(
            [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_keys)]
        )
        k, v = torch.randn(2, num_keys, kv_heads, head_dim, generator=generator)
        write_kv(k, v, k_cache, v_cache, slots)
        tables.append(table)
    num_tokens = sum(query_len for _, query_len in shares)
    q = torch.randn(num_tokens, heads, head_dim, generator=generator)
    lens, starts = [n for _, n in shares], [s for s, _ in shares]
    return Case(q, k_cache, v_cache, lens, starts, tables, implementation)
