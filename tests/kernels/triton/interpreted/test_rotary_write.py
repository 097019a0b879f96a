"""Rotary and KV write against plain torch, bit for bit, in caches of every type."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels.kv_scaled import round_rows
from outrider_kernels.kv_write import rotate_and_write as reference
from outrider_kernels.triton_ops.rotary_write import rotate_and_write
from tests.kernels.triton.interpreted.paged_case import SCALED

PAGE, NUM_BLOCKS, NUM_ROWS = 16, 3, 5
SLOTS = [33, 2, 47, 16]


def make_input(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, values (parts of one product's rows), cos and signed sin."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(NUM_ROWS, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    angle = torch.rand(NUM_ROWS, 1, head_dim // 2, generator=generator) * 6
    cos = torch.cat([angle.cos(), angle.cos()], -1)
    signed_sin = torch.cat([-angle.sin(), angle.sin()], -1)
    return qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :], cos, signed_sin


def poisoned(kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache of NaN."""
    return torch.full((NUM_BLOCKS, PAGE, kv_heads, head_dim), torch.nan, dtype=dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.float().nan_to_num(9e9), b.float().nan_to_num(9e9))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (9, 3, 64, torch.bfloat16),
        (4, 2, 80, torch.float16),
        (3, 1, 96, torch.bfloat16),
        (17, 1, 128, torch.float32),
        (2, 2, 16, torch.float32),
    ],
)
def test_equals_the_reference(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Queries, keys and values have the reference's bits; other slots and padding are untouched."""
    inputs, slots = make_input(heads, kv_heads, head_dim, dtype), torch.tensor(SLOTS)
    caches = [poisoned(kv_heads, head_dim, dtype) for _ in range(4)]
    expected = reference(*inputs, *caches[:2], slots)
    got = rotate_and_write(*inputs, *caches[2:], slots)
    assert torch.equal(got, expected)
    assert same(caches[0], caches[2]) and same(caches[1], caches[3])


@pytest.mark.parametrize("cache", SCALED)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (80, torch.float16)], ids=str
)
def test_eight_bits_equal_the_reference(head_dim: int, dtype: torch.dtype, cache: str) -> None:
    """Rotated in float32 and rounded once, scales and values bit for bit."""
    queries_keys, values, cos, signed_sin = make_input(5, 2, head_dim, dtype)
    queries_keys[0, 6], values[1, 0] = 0.0, 1e-6
    slots = torch.tensor([*SLOTS[:3], -1])
    wide = [poisoned(2, head_dim, torch.float32) for _ in range(2)]
    float_inputs = (queries_keys.float(), values.float(), cos, signed_sin)
    expected = reference(*float_inputs, *wide, slots[:3])
    shape = (NUM_BLOCKS, PAGE, 2)
    caches = [torch.zeros((*shape, head_dim), dtype=SCALED[cache]) for _ in range(2)]
    scales = [torch.full(shape, 7.0) for _ in range(2)]
    got = rotate_and_write(queries_keys, values, cos, signed_sin, *caches, slots, *scales)
    assert torch.equal(got, expected.to(dtype))
    for stored, scale, truth in zip(caches, scales, wide, strict=True):
        rows = truth.view(-1, 2, head_dim)[slots[:3]]
        want_values, want_scales = round_rows(rows, SCALED[cache])
        got_values = stored.view(-1, 2, head_dim)[slots[:3]]
        assert torch.equal(got_values.view(torch.uint8), want_values.view(torch.uint8))
        assert torch.equal(scale.view(-1, 2)[slots[:3]], want_scales)
        assert int((scale == 7.0).sum()) == (NUM_BLOCKS * PAGE - 3) * 2


@pytest.mark.parametrize("cache", SCALED)
def test_numbers_that_are_none_are_kept_in_the_scale(cache: str) -> None:
    """NaN or infinity in a key or value makes its row's scale NaN, and no other's."""
    queries_keys, values, cos, signed_sin = make_input(2, 2, 64, torch.bfloat16)
    queries_keys[1, 2, 3], values[0, 1, 5] = torch.inf, torch.nan
    shape = (NUM_BLOCKS, PAGE, 2)
    caches = [torch.zeros((*shape, 64), dtype=SCALED[cache]) for _ in range(2)]
    k_scales, v_scales = torch.zeros(shape), torch.zeros(shape)
    slots = torch.tensor(SLOTS)
    rotate_and_write(queries_keys, values, cos, signed_sin, *caches, slots, k_scales, v_scales)
    assert k_scales.view(-1, 2).isnan().nonzero().tolist() == [[SLOTS[1], 0]]
    assert v_scales.view(-1, 2).isnan().nonzero().tolist() == [[SLOTS[0], 1]]


def test_all_numbers_of_e4m3_survive() -> None:
    """Each of the finite values, and what lies between two of them, is rounded as torch rounds."""
    bits = torch.arange(256, dtype=torch.uint8)
    exact = bits.view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    numbers = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.01]).clamp(-448, 448)
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 63)).view(-1, 63)
    rows = torch.cat([rows, torch.full((len(rows), 1), 448.0)], 1)  # so that scales are 1
    for row in rows:
        x = torch.stack([torch.zeros(64), row])[None].to(torch.float16)
        caches = [torch.zeros((1, PAGE, 1, 64), dtype=torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.zeros(1, PAGE, 1) for _ in range(2)]
        cos, sin = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
        rotate_and_write(x, x[:, 1:], cos, sin, *caches, torch.tensor([3]), *scales)
        expected = x[0, 1].float().to(torch.float8_e4m3fn)
        for cache in caches:
            assert torch.equal(cache[0, 3, 0].float(), expected.float())


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, types and blocks that no table lists are named."""
    inputs, slots = make_input(4, 2, 64, torch.bfloat16), torch.tensor(SLOTS)
    cache = poisoned(2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit activations"):
        rotate_and_write(*inputs, cache.half(), cache.half(), slots)
    with pytest.raises(ValueError, match="blocks of 48 tokens"):
        rotate_and_write(*inputs, cache.view(1, 48, 2, 64), cache.view(1, 48, 2, 64), slots)
    with pytest.raises(ValueError, match="needs float32 scales"):
        rotate_and_write(*inputs, cache.to(torch.int8), cache.to(torch.int8), slots)
    with pytest.raises(ValueError, match="int64 slots"):
        rotate_and_write(*inputs, cache, cache, slots.int())
