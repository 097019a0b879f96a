"""Paged attention and KV write against the plain reference, on odd shapes and poisoned caches.

Everything holds of plain torch and of the C++ for each instruction set that the machine has.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from outrider_kernels import native_attention
from outrider_kernels.attention import KEY_CHUNK
from outrider_kernels.kv_write import write_kv
from outrider_kernels.reference import reference_write_kv
from tests.support.attention_cases import BLOCK_SIZE, NUM_BLOCKS, Case, make_case
from tests.support.implementations import IMPLEMENTATIONS, library

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@cache
def reference_of(
    shares: tuple[tuple[int, int], ...], heads: int, kv_heads: int, head_dim: int
) -> torch.Tensor:
    """The truth about a case, which takes its time: once for all implementations."""
    return make_case(list(shares), heads, kv_heads, head_dim, "torch").reference()


@each_implementation
@pytest.mark.parametrize(
    "shares",
    [
        [(0, 1)],
        [(0, 40), (17, 1), (130, 5)],
        [(127, 1), (128, 2), (255, 3), (300, 9)],
        [(5, 60), (0, 130)],
        [(510, 4), (255, 1), (256, 2)],
    ],
    ids=["first-token", "mixed", "chunk-edges", "prefills", "split-edges"],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 8), (9, 3, 16), (14, 2, 8), (17, 1, 8), (2, 1, 72), (49, 1, 24)],
)
def test_attention_equals_the_reference(
    shares: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    implementation: str,
) -> None:
    """Any mix of lengths and positions, any grouping of heads, NaN in every unused slot."""
    case = make_case(shares, heads, kv_heads, head_dim, implementation)
    expected = reference_of(tuple(shares), heads, kv_heads, head_dim)
    torch.testing.assert_close(case.attend(), expected, rtol=1e-5, atol=2e-6)


@each_implementation
@pytest.mark.parametrize("head_dim", [16, 20])
def test_narrow_queries_and_cache_are_rounded_once(implementation: str, head_dim: int) -> None:
    """bfloat16 in, float32 sums, bfloat16 out: the reference of the same numbers, rounded."""
    case = make_case([(0, 40), (17, 1), (300, 5)], 9, 3, head_dim, implementation)
    case = case.to(torch.bfloat16)
    out = case.attend()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, case.reference(), rtol=1e-2, atol=1e-5)


@each_implementation
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_passed_on(implementation: str, value: float) -> None:
    """A query that is not finite gives its own row NaN, so that it is noticed, and no other."""
    case = make_case([(20, 3), (300, 3)], 4, 2, 16, implementation)
    case.q[1, 2, 5] = case.q[4, 0, 0] = value
    spoilt = case.attend().isnan().any(-1).nonzero().tolist()
    assert spoilt == [[1, 2], [4, 0]]


@each_implementation
def test_padding_rows_stay_finite(implementation: str) -> None:
    """Rows of q beyond the tokens come out finite, whatever they are."""
    case = make_case([(20, 2)], 4, 2, 8, implementation)
    for padding in (0.0, torch.inf, torch.nan):
        out = case.attend_all(num_rows=8, padding=padding)
        assert out.shape[0] == 8
        assert torch.isfinite(out).all()
        assert torch.equal(out[:2], case.attend())


@each_implementation
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_do_not_feel_their_company(num_threads: int, implementation: str) -> None:
    """A sequence's output has the same bits alone, in a batch, and one token at a time."""
    shares = [(3, 1), (KEY_CHUNK - 2, 9), (250, 20), (0, 33), (290, 1)]
    case = make_case(shares, 9, 3, 64, implementation)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = case.attend(num_rows=80)
        row = 0
        for i, query_len in enumerate(case.query_lens):
            for size in (1, 7, query_len):
                for begin in range(0, query_len, size):
                    end = min(begin + size, query_len)
                    alone = Case(
                        case.q[row + begin : row + end],
                        case.k_cache,
                        case.v_cache,
                        [end - begin],
                        [case.starts[i] + begin],
                        [case.block_tables[i]],
                        implementation,
                    )
                    assert torch.equal(alone.attend(num_rows=8), together[row + begin : row + end])
            row += query_len
    finally:
        torch.set_num_threads(threads_before)


def test_bits_are_the_same_with_more_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting a large step into many products changes nothing."""
    case = make_case([(0, 130), (200, 40)], 9, 3, 16, "torch")
    whole = case.attend()
    monkeypatch.setattr("outrider_kernels.attention._MAX_PRODUCTS", 1)
    assert torch.equal(case.attend(), whole)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 40), (3, 3, 128)])
def test_bits_are_the_same_in_any_tiles_units_and_threads(
    monkeypatch: pytest.MonkeyPatch,
    isa: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """How the C++ shares out the work of a step, and who does it, changes nothing."""
    case = make_case([(0, 130), (590, 40), (300, 1)], heads, kv_heads, head_dim, isa)
    case.q, case.k_cache, case.v_cache = (
        tensor.to(dtype) for tensor in (case.q, case.k_cache, case.v_cache)
    )
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads, tile_rows, unit_rows, units in [
            (1, 48, 144, 1), (2, 48, 144, 4), (3, 1, 1, 8), (5, 7, 20, 1000), (2, 48, 1000, 50),
        ]:  # fmt: skip
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(native_attention, "TILE_ROWS", tile_rows)
            monkeypatch.setattr(native_attention, "UNIT_ROWS", unit_rows)
            monkeypatch.setattr(native_attention, "UNITS_PER_THREAD", units)
            outs.append(case.attend())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_avx2_and_avx512_give_the_same_bits(dtype: torch.dtype) -> None:
    """Registers of another width change nothing, on machines that have both."""
    outs = []
    for isa in ("avx2", "avx512"):
        library(isa)
        case = make_case([(0, 130), (590, 40)], 9, 3, 40, isa)
        case.q, case.k_cache, case.v_cache = (
            tensor.to(dtype) for tensor in (case.q, case.k_cache, case.v_cache)
        )
        outs.append(case.attend())
    assert torch.equal(*outs)


def test_callers_share_the_threads() -> None:
    """Several at once, as target and drafter in one process: right bits, and nobody waits long."""
    case = make_case([(200, 30), (3, 1)], 9, 3, 16, IMPLEMENTATIONS[-1])
    expected = case.attend()
    with ThreadPoolExecutor(4) as callers:
        outs = list(callers.map(lambda _: case.attend(), range(200)))
    assert all(torch.equal(out, expected) for out in outs)


def test_a_forked_process_has_threads_of_its_own() -> None:
    """A child made by fork computes on, though its parent's threads are not there."""
    case = make_case([(200, 30), (3, 1)], 9, 3, 16, IMPLEMENTATIONS[-1])
    expected = case.attend().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks beside threads: that is the point
        child = os.fork()
    if child == 0:
        os._exit(0 if (case.attend().numpy() == expected).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_write_equals_the_reference() -> None:
    """Only the named slots change, padding rows are left out, strided input is fine."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(8, 7, 16, generator=generator)
    k, v = qkv[:, 2:4], qkv[:, 5:7]
    slots = torch.tensor([33, 2, 1023, 7, 640])
    caches = [torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 16), torch.nan) for _ in range(4)]
    write_kv(k, v, caches[0], caches[1], slots)
    reference_write_kv(k, v, caches[2], caches[3], slots)
    for got, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
