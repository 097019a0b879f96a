"""The cache in int8: what is written is the same everywhere, and attention reads it exactly.

Attention is compared with the reference of what the rounded cache holds, in plain torch and in the
C++ for each instruction set that the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from outrider_kernels import native_attention
from outrider_kernels.kv_rows import KV_GROUP, kv_row_size, round_kv, widen_kv
from outrider_kernels.ops import Ops
from tests.support.attention_cases import Case, make_case
from tests.support.implementations import IMPLEMENTATIONS, library, ops_of

NUM_SLOTS = 64

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_isa = pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_shape = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (14, 2, 8), (2, 1, 72), (2, 2, 20)]
)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write(
    ops: Ops, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, turned: bool = False
) -> torch.Tensor:
    """Rows of keys and values [rows, kv_heads, head_dim] as a cache of poison keeps them.

    int8 [2, NUM_SLOTS, kv_heads, row]; turned: by angles of their own.
    """
    num_rows, kv_heads, head_dim = keys.shape
    size = kv_row_size(head_dim, torch.int8)
    caches = [torch.full((4, NUM_SLOTS // 4, kv_heads, size), -1, dtype=torch.int8) for _ in "kv"]
    angles = torch.linspace(0, 3, num_rows * head_dim).view(num_rows, 1, head_dim) * turned
    queries_keys = torch.cat([torch.zeros_like(keys), keys], 1)
    ops.rotate_and_write(queries_keys, values, angles.cos(), angles.sin(), *caches, slots)
    return torch.stack(caches).flatten(1, 2)


def keys_and_values(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, 40, 3, head_dim] of all sizes, some of them nothing or next to it."""
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(2, 40, 3, head_dim, generator=generator)
        * torch.logspace(-6, 6, 40)[:, None, None]
    )
    x[:, 3] = 0.0
    x[:, 4] = 1e-38
    x[:, 5, :, 1:] = 0.0
    return x.to(dtype)


@each_dtype
@each_implementation
@pytest.mark.parametrize("head_dim", [64, 8, 20, 72, 128])
def test_what_is_written_is_the_same_everywhere(
    implementation: str, head_dim: int, dtype: torch.dtype
) -> None:
    """Byte for byte what plain torch rounds; other slots stay as they were."""
    keys, values = keys_and_values(head_dim, dtype)
    slots = torch.arange(40).flip(0) + 11
    written = write(ops_of(implementation), keys, values, slots)
    expected = torch.full_like(written, -1)
    expected[:, slots] = round_kv(torch.stack([keys, values]))
    assert torch.equal(written, expected)


@pytest.mark.parametrize("head_dim", [64, 20])
def test_rounding_is_to_the_nearest_of_127_steps(head_dim: int) -> None:
    """Each value within half a step of its group's, and steps are as small as bfloat16 has them."""
    x = keys_and_values(head_dim, torch.float32)
    rows = round_kv(x)
    assert rows.shape[-1] == head_dim + 2 * -(-head_dim // KV_GROUP)
    wrong = (widen_kv(rows, head_dim) - x).abs()
    for begin in range(0, head_dim, KV_GROUP):
        largest = x[..., begin : begin + KV_GROUP].abs().amax(-1, keepdim=True)
        limit = largest / 127 * (1 + 2**-7) / 2 * (1 + 1e-5) + 1e-30
        assert (wrong[..., begin : begin + KV_GROUP] <= limit).all()
    assert (rows[..., :head_dim] != -128).all()


@each_implementation
def test_a_row_is_rounded_by_its_own_values_alone(implementation: str) -> None:
    """The same bytes alone and in company, at any place, with the keys turned."""
    keys, values = keys_and_values(72, torch.bfloat16)
    ops, slots = ops_of(implementation), torch.arange(40)
    together = write(ops, keys, values, slots, turned=True)
    for begin, end in ((0, 1), (7, 30), (16, 17), (39, 40)):
        alone = together.clone().fill_(-1)
        angles = torch.linspace(0, 3, 40 * 72).view(40, 1, 72)[begin:end]
        queries_keys = torch.cat([keys, keys], 1)[begin:end]
        caches = [each.view(4, NUM_SLOTS // 4, 3, -1) for each in alone]
        ops.rotate_and_write(
            queries_keys, values[begin:end], angles.cos(), angles.sin(), *caches, slots[begin:end]
        )
        assert torch.equal(alone[:, begin:end], together[:, begin:end])


@each_isa
@each_dtype
def test_turned_keys_agree_with_torch(isa: str, dtype: torch.dtype) -> None:
    """But for the rounding of the turn, which may tip a value over to the next step."""
    keys, values = keys_and_values(64, dtype)
    slots = torch.arange(40)
    found, expected = (
        widen_kv(write(ops_of(each), keys, values, slots, turned=True)[:, :40], 64)
        for each in (isa, "torch")
    )
    step = expected.abs().amax(-1, keepdim=True) / 127
    assert ((found - expected).abs() <= step * 1.02).all()
    assert (found != expected).float().mean() < 0.01


def rounded_case(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, implementation: str
) -> Case:
    """Sequences at the edges of a split, and one that begins."""
    case = make_case([(0, 20), (255, 2), (130, 3)], heads, kv_heads, head_dim, implementation)
    return replace(case.in_int8(), q=case.q.to(dtype))


@cache
def reference_of(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The truth about a case, which takes its time: once for all implementations."""
    return rounded_case(heads, kv_heads, head_dim, dtype, "torch").reference()


@each_shape
@each_dtype
@each_implementation
def test_attention_equals_the_reference_of_the_rounded_cache(
    implementation: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Widening loses nothing: float32 sums of exactly what is stored; unused slots are poison."""
    out = rounded_case(heads, kv_heads, head_dim, dtype, implementation).attend()
    assert out.dtype == dtype
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (1e-2, 1e-5)
    expected = reference_of(heads, kv_heads, head_dim, dtype)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@each_implementation
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.usefixtures("restore_threads")
def test_rows_do_not_feel_their_company(num_threads: int, implementation: str) -> None:
    """A sequence's output has the same bits alone, in a batch, and one token at a time."""
    case = make_case([(3, 1), (126, 9), (250, 20), (0, 33)], 9, 3, 64, implementation).in_int8()
    torch.set_num_threads(num_threads)
    together = case.attend(num_rows=80)
    row = 0
    for i, query_len in enumerate(case.query_lens):
        for size in (1, 7, query_len):
            for begin in range(0, query_len, size):
                end = min(begin + size, query_len)
                alone = replace(
                    case,
                    q=case.q[row + begin : row + end],
                    query_lens=[end - begin],
                    starts=[case.starts[i] + begin],
                    block_tables=[case.block_tables[i]],
                )
                assert torch.equal(alone.attend(num_rows=8), together[row + begin : row + end])
        row += query_len


@each_isa
@each_dtype
@pytest.mark.usefixtures("restore_threads")
def test_bits_are_the_same_in_any_tiles_units_and_threads(
    monkeypatch: pytest.MonkeyPatch, isa: str, dtype: torch.dtype
) -> None:
    """How the C++ shares out the work of a step, and who does it, changes nothing."""
    case = make_case([(0, 130), (590, 40), (300, 1)], 9, 3, 40, isa).in_int8()
    case = replace(case, q=case.q.to(dtype))
    outs = []
    for num_threads, tile_rows, unit_rows, units in [
        (1, 48, 144, 1), (2, 48, 144, 4), (5, 7, 20, 1000), (2, 48, 1000, 50),
    ]:  # fmt: skip
        torch.set_num_threads(num_threads)
        monkeypatch.setattr(native_attention, "TILE_ROWS", tile_rows)
        monkeypatch.setattr(native_attention, "UNIT_ROWS", unit_rows)
        monkeypatch.setattr(native_attention, "UNITS_PER_THREAD", units)
        outs.append(case.attend())
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_avx2_and_avx512_give_the_same_bits() -> None:
    """Registers of another width change nothing, on machines that have both."""
    outs = []
    for isa in ("avx2", "avx512"):
        library(isa)
        outs.append(make_case([(0, 130), (590, 40)], 9, 3, 40, isa).in_int8().attend())
    assert torch.equal(*outs)


@each_implementation
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_keys_that_are_no_numbers_are_noticed(implementation: str, value: float) -> None:
    """Whoever sees such a key or value gets NaN; other sequences and heads do not."""
    case = make_case([(0, 20), (0, 20)], 2, 2, 64, implementation)
    first, second = case.block_tables[0][0], case.block_tables[1][1]
    case.k_cache[first, 7, 0, 33] = case.v_cache[second, 2, 1, 5] = value
    spoilt = case.in_int8().attend().isnan().any(-1)
    assert spoilt[7:20, 0].all() and spoilt[38:40, 1].all()
    assert not spoilt[:20, 1].any() and not spoilt[20:, 0].any()


@each_isa
def test_caches_that_do_not_fit_are_refused(isa: str) -> None:
    """Rows without scales, or keys and values of two kinds: an error, not a wild pointer."""
    case = make_case([(0, 4)], 2, 1, 64, isa).in_int8()
    for wrong in (
        replace(case, k_cache=case.k_cache[..., :64].contiguous()),
        replace(case, v_cache=case.v_cache[..., :64].contiguous()),
        replace(case, v_cache=torch.zeros(case.v_cache.shape)),
        replace(
            case, k_cache=case.k_cache.view(torch.uint8), v_cache=case.v_cache.view(torch.uint8)
        ),
        replace(
            case, k_cache=case.k_cache[:, :8].contiguous(), v_cache=case.v_cache[:, :8].contiguous()
        ),
    ):
        with pytest.raises(ValueError):
            wrong.attend()
    for caches in ((case.k_cache[..., :64].contiguous(), case.v_cache), (case.k_cache, case.q)):
        with pytest.raises(ValueError):
            ops_of(isa).rotate_and_write(
                case.q, case.q[:, :1], *torch.zeros(2, 4, 1, 64), *caches, torch.arange(4)
            )
