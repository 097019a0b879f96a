"""Every kernel for GPUs against plain torch on the CPU, on one step of scattered sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu_compare import Check, Checks, error_of, name_of, random_values, run_checks
from bench.gpu_products import MATRICES, VOCABULARIES, choice_checks, product_checks
from outrider_kernels import attention as plain_attention
from outrider_kernels import elementwise
from outrider_kernels.kv_scaled import round_rows, widen_rows
from outrider_kernels.triton_ops import attention, rotary_write, rows
from outrider_kernels.triton_ops.configs import PAGE_SIZE
from outrider_kernels.triton_ops.work import plan_attention

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-6}
"""Of the whole result, by the type that it is rounded to."""
DTYPES = tuple(TOLERANCE)
CACHES = (None, torch.int8, torch.float8_e4m3fn)
"""None: of the activations' type."""
WIDTHS = (576, 4096)
NUM_ROWS = 37
HEADS = ((9, 3, 64), (32, 8, 128))
"""Heads, KV heads, head size."""
SHARES = ((1030, 5), (511, 1), (0, 40), (63, 9))
"""Sequences of a step: tokens before it, and tokens in it."""


def check_kernels(
    device: torch.device,
    *,
    widths: Sequence[int] = WIDTHS,
    heads: Sequence[tuple[int, int, int]] = HEADS,
    shares: Sequence[tuple[int, int]] = SHARES,
    matrices: Sequence[tuple[int, int]] = MATRICES,
    vocabularies: Sequence[int] = VOCABULARIES,
) -> list[Check]:
    """All of them; a kernel that raises is an error of infinity, and the others go on."""
    return run_checks(
        [
            *_all_checks(device, widths, heads, shares),
            *product_checks(device, matrices),
            *choice_checks(device, vocabularies),
        ]
    )


def _all_checks(
    device: torch.device,
    widths: Sequence[int],
    heads: Sequence[tuple[int, int, int]],
    shares: Sequence[tuple[int, int]],
) -> Checks:
    for dtype in DTYPES:
        for width in widths:
            yield from _row_checks(device, dtype, width)
        for shape in heads:
            for cache in CACHES if dtype != torch.float32 else (None,):
                name = f"{name_of(dtype)} cache {name_of(cache or dtype)} {shape}"
                yield f"rotary {name}", partial(_rotary, device, dtype, cache, shape), 0.0
                step = Step.make(device, dtype, cache, shape, shares)
                for invariant in (True, False):
                    mode = "invariant" if invariant else "fast"
                    error = partial(step.error, invariant)
                    yield f"attention {mode} {name}", error, TOLERANCE[dtype]
                yield f"attention alone equals in company {name}", step.differing, 0.0


def _row_checks(device: torch.device, dtype: torch.dtype, width: int) -> Checks:
    x, residual = (random_values(NUM_ROWS, width, seed=seed).to(dtype) for seed in (0, 1))
    weight, gate_up = 1 + 0.1 * random_values(width), random_values(NUM_ROWS, 2 * width).to(dtype)
    name = f"{name_of(dtype)} {width}"

    def norm() -> float:
        found = rows.rms_norm(x.to(device), weight.to(device), 1e-5)
        return error_of(found, elementwise.rms_norm(x, weight, 1e-5))

    def add_norm() -> float:
        ours, theirs = residual.to(device, copy=True), residual.clone()
        found = rows.add_rms_norm(x.to(device), ours, weight.to(device), 1e-5)
        expected = elementwise.add_rms_norm(x, theirs, weight, 1e-5)
        return error_of(torch.cat([found, ours]), torch.cat([expected, theirs]))

    def silu() -> float:
        return error_of(rows.silu_mul(gate_up.to(device)), elementwise.silu_mul(gate_up))

    yield f"rms_norm {name}", norm, TOLERANCE[dtype]
    yield f"add_rms_norm {name}", add_norm, TOLERANCE[dtype]
    yield f"silu_mul {name}", silu, TOLERANCE[dtype]


def _rotary(
    device: torch.device,
    dtype: torch.dtype,
    cache: torch.dtype | None,
    shape: tuple[int, int, int],
) -> float:
    """Of queries, and of keys and values as the cache has them."""
    heads, kv_heads, head_dim = shape
    queries_keys = random_values(NUM_ROWS, heads + kv_heads, head_dim).to(dtype)
    values = random_values(NUM_ROWS, kv_heads, head_dim, seed=1).to(dtype)
    cos, sin = (random_values(NUM_ROWS, 1, head_dim, seed=seed) for seed in (2, 3))
    slots = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(4))[:NUM_ROWS]
    rotated = elementwise.rotary(queries_keys.float(), cos, sin)
    expected = [rotated[:, :heads].to(dtype)]
    for rows_of in (rotated[:, heads:], values):
        expected.append(
            rows_of.to(dtype) if cache is None else widen_rows(*round_rows(rows_of, cache))
        )

    size = (4, PAGE_SIZE, kv_heads)
    caches = [torch.zeros(*size, head_dim, dtype=cache or dtype, device=device) for _ in range(2)]
    scales = [] if cache is None else [torch.zeros(size, device=device) for _ in range(2)]
    ours = [x.to(device) for x in (queries_keys, values, cos, sin, slots)]
    k_scales, v_scales = scales or (None, None)
    q = rotary_write.rotate_and_write(
        ours[0], ours[1], ours[2], ours[3], caches[0], caches[1], ours[4], k_scales, v_scales
    )
    found = [q]
    for i in range(2):
        written = caches[i].cpu().flatten(0, 1)
        if scales:
            written = widen_rows(written, scales[i].cpu().flatten(0, 1))
        found.append(written[slots])
    return max(error_of(a, b) for a, b in zip(found, expected, strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """Attention's inputs on a device; the cache holds NaN where no token is."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    shares: Sequence[tuple[int, int]]
    tables: list[list[int]]

    @staticmethod
    def make(
        device: torch.device,
        dtype: torch.dtype,
        cache: torch.dtype | None,
        shape: tuple[int, int, int],
        shares: Sequence[tuple[int, int]],
    ) -> Step:
        """Random numbers in random blocks."""
        heads, kv_heads, head_dim = shape
        used = [-(-(start + count) // PAGE_SIZE) for start, count in shares]
        order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in used]
        caches: list[torch.Tensor] = []
        scales: list[torch.Tensor | None] = []
        for seed in (1, 2):
            full = random_values(sum(used), PAGE_SIZE, kv_heads, head_dim, seed=seed).to(dtype)
            for (start, count), table in zip(shares, tables, strict=True):
                full[table[-1], (start + count - 1) % PAGE_SIZE + 1 :] = torch.nan
            if cache is None:
                caches.append(full.to(device))
                scales.append(None)
            else:
                values, scale = round_rows(full, cache)
                caches.append(values.to(device))
                scales.append(scale.to(device))
        num_tokens = sum(count for _, count in shares)
        q = random_values(num_tokens, heads, head_dim).to(dtype).to(device)
        return Step(q, caches, scales, shares, tables)

    def attend(self, invariant: bool) -> torch.Tensor:
        """The kernel's result."""
        work = plan_attention(
            *self._lens(),
            block_size=PAGE_SIZE,
            num_heads=self.q.shape[1],
            kv_heads=self.caches[0].shape[2],
            num_rows=self.q.shape[0],
            invariant=invariant,
            max_tile=32 if self.q.dtype == torch.float32 else 128,
        )
        return attention.paged_attention(
            self.q, self.caches[0], self.caches[1], work.to(self.q.device), *self.scales
        )  # fmt: skip

    def error(self, invariant: bool) -> float:
        """Against plain torch in float32, on what the cache holds."""
        wide = [
            cache.cpu().float() if scale is None else widen_rows(cache.cpu(), scale.cpu())
            for cache, scale in zip(self.caches, self.scales, strict=True)
        ]
        _, heads, _ = self.q.shape
        plan = plain_attention.plan_attention(
            *self._lens(),
            block_size=PAGE_SIZE,
            num_heads=heads,
            kv_heads=wide[0].shape[2],
            num_rows=self.q.shape[0],
        )
        expected = plain_attention.paged_attention(self.q.cpu().float(), wide[0], wide[1], plan)
        return error_of(self.attend(invariant), expected)

    def differing(self) -> float:
        """Values that another company changes: each sequence alone against all together."""
        together, row, differing = self.attend(True), 0, 0
        for i, (_, count) in enumerate(self.shares):
            part = slice(row, row + count)
            alone = Step(self.q[part], self.caches, self.scales, [self.shares[i]], [self.tables[i]])
            differing += int((alone.attend(True) != together[part]).sum())
            row += count
        return float(differing)

    def _lens(self) -> tuple[list[int], list[int], list[list[int]]]:
        return [n for _, n in self.shares], [start for start, _ in self.shares], self.tables
