"""A step over a paged cache whose unused slots hold NaN, for kernels and for the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider_kernels.kv_scaled import round_rows, widen_rows
from outrider_kernels.reference import reference_paged_attention
from outrider_kernels.triton_ops.attention import paged_attention
from outrider_kernels.triton_ops.work import plan_attention

PAGE = 16
SCALED = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """Sequences that forward some tokens each, with the cache as it is stored."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    query_lens: list[int]
    starts: list[int]
    tables: list[list[int]]

    def attend(
        self,
        *,
        num_rows: int | None = None,
        invariant: bool = True,
        num_processors: int = 132,
    ) -> torch.Tensor:
        """The kernels' output, with rows of NaN behind the tokens up to num_rows."""
        num_tokens, heads, head_dim = self.q.shape
        rows = max(num_tokens, num_rows or 0)
        padding = self.q.new_full((rows - num_tokens, heads, head_dim), torch.nan)
        work = plan_attention(
            self.query_lens,
            self.starts,
            self.tables,
            block_size=PAGE,
            num_heads=heads,
            kv_heads=self.k_cache.shape[2],
            num_rows=rows,
            invariant=invariant,
            num_processors=num_processors,
            max_tile=32 if self.q.dtype == torch.float32 else 128,
        )
        q = torch.cat([self.q, padding])
        return paged_attention(q, self.k_cache, self.v_cache, work, self.k_scales, self.v_scales)

    def reference(self) -> torch.Tensor:
        """The truth of the numbers that the cache holds."""
        k, v = self.k_cache, self.v_cache
        if self.k_scales is not None and self.v_scales is not None:
            k, v = widen_rows(k, self.k_scales), widen_rows(v, self.v_scales)
        out = reference_paged_attention(
            self.q.float(), k.float(), v.float(), self.query_lens, self.starts, self.tables
        )
        return out.to(self.q.dtype)

    def part(self, item: int, begin: int, end: int) -> Case:
        """Only some tokens of one sequence, after those before them."""
        row = sum(self.query_lens[:item])
        return replace(
            self,
            q=self.q[row + begin : row + end],
            query_lens=[end - begin],
            starts=[self.starts[item] + begin],
            tables=[self.tables[item]],
        )


def make_case(
    shares: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    cache: str = "plain",
) -> Case:
    """Sequences of (start, query_len) with scattered blocks; cache: plain, int8 or e4m3."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = sum(-(-(start + n) // PAGE) for start, n in shares) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-(start + n) // PAGE))] for start, n in shares]
    shape = (num_blocks, PAGE, kv_heads, head_dim)
    k, v = torch.randn((2, *shape), generator=generator)
    used = torch.zeros(num_blocks, PAGE, dtype=torch.bool)
    for (start, n), table in zip(shares, tables, strict=True):
        for position in range(start + n):
            used[table[position // PAGE], position % PAGE] = True
    stored = [_store(x, used, dtype, cache) for x in (k, v)]
    num_tokens = sum(n for _, n in shares)
    q = torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)
    lens, starts = [n for _, n in shares], [start for start, _ in shares]
    (k_cache, k_scales), (v_cache, v_scales) = stored
    return Case(q, k_cache, v_cache, k_scales, v_scales, lens, starts, tables)


def _store(
    x: torch.Tensor, used: torch.Tensor, dtype: torch.dtype, cache: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache and its scales, poisoned where no token is."""
    if cache == "plain":
        return x.to(dtype).masked_fill(~used[..., None, None], torch.nan), None
    values, scales = round_rows(x, SCALED[cache])
    poison = values.view(torch.uint8).masked_fill(~used[..., None, None], 0x7F)
    return poison.view(values.dtype), scales.masked_fill(~used[..., None], torch.nan)
