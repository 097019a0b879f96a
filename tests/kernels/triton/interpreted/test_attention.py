"""Paged attention against the truth, on ragged steps, odd heads and poisoned caches."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels.triton_ops.work import plan_attention
from tests.kernels.triton.interpreted.paged_case import Case, make_case

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-6}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = [(0, 20), (17, 1), (130, 5), (63, 1)]


def assert_right(case: Case, out: torch.Tensor) -> None:
    """As the truth, within the type's rounding of weights and result."""
    expected, out = case.reference().float(), out[: len(case.q)].float()
    assert (out - expected).norm() <= TOLERANCE[case.q.dtype] * expected.norm()
    torch.testing.assert_close(out, expected, rtol=0, atol=8 * TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "fast"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "cache"),
    [
        (9, 3, 64, FP32, "plain"),
        (7, 1, 80, FP32, "plain"),
        (2, 2, 16, FP32, "plain"),
        (3, 1, 64, BF16, "plain"),
        (17, 1, 96, BF16, "plain"),
        (8, 1, 128, FP16, "plain"),
        (3, 1, 64, BF16, "int8"),
        (8, 1, 80, FP16, "int8"),
        (3, 1, 64, BF16, "e4m3"),
        (8, 1, 96, FP16, "e4m3"),
    ],
)
def test_attention_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, cache: str, invariant: bool
) -> None:
    """Chunks, single tokens and drafts in one step, NaN in every slot that no token has."""
    case = make_case(RAGGED, heads, kv_heads, head_dim, dtype, cache)
    out = case.attend(num_rows=30, invariant=invariant)
    assert_right(case, out)
    assert (out[len(case.q) :] == 0).all()


@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "fast"])
@pytest.mark.parametrize(("dtype", "cache"), [(FP32, "plain"), (BF16, "plain"), (BF16, "int8")])
def test_many_splits_are_merged(dtype: torch.dtype, cache: str, invariant: bool) -> None:
    """Tokens and drafts over contexts that several programs share, at the edges of splits."""
    case = make_case([(1030, 5), (511, 3), (255, 1)], 3, 1, 64, dtype, cache)
    assert_right(case, case.attend(invariant=invariant))


def test_long_chunks_and_single_tokens_have_launches_of_their_own() -> None:
    """In fast mode: wide tiles for a prompt, narrow ones for the others, one right result."""
    case = make_case([(3, 40), (100, 1), (5, 2)], 4, 1, 64, BF16)
    plan = plan_attention(
        case.query_lens, case.starts, case.tables, block_size=16, num_heads=4, kv_heads=1,
        num_rows=43, invariant=False,
    )  # fmt: skip
    assert [rows for rows, _ in plan.launches] == [128, 16]
    assert_right(case, case.attend(invariant=False))


def test_sequences_and_steps_may_be_empty() -> None:
    """No tokens of a sequence, no context, no step at all."""
    case = make_case([(0, 1), (20, 0), (0, 3), (4, 0)], 4, 2, 16)
    for invariant in (True, False):
        assert_right(case, case.attend(invariant=invariant))
        nothing = make_case([(20, 0)], 4, 2, 16).attend(invariant=invariant, num_rows=3)
        assert nothing.shape == (3, 4, 16) and (nothing == 0).all()


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (FP32, "plain"),
        (BF16, "plain"),
        pytest.param(FP16, "plain", marks=pytest.mark.slow),
        pytest.param(BF16, "int8", marks=pytest.mark.slow),
        (FP16, "e4m3"),
    ],
)
def test_rows_do_not_feel_their_company(dtype: torch.dtype, cache: str) -> None:
    """Invariant mode: the same bits alone, in a batch, in chunks, and with any number of drafts."""
    case = make_case([(3, 1), (508, 9), (0, 23), (70, 2)], 3, 1, 64, dtype, cache)
    together = case.attend(num_rows=40)
    parts = [
        [(0, 1)],
        [(0, 1), (3, 4), (4, 5), (0, 5), (8, 9)],
        [(0, 7), (7, 23), (22, 23)],
        [(0, 1), (1, 2)],
    ]
    row = 0
    for item, query_len in enumerate(case.query_lens):
        for begin, end in parts[item]:
            alone = case.part(item, begin, end).attend()
            assert torch.equal(alone, together[row + begin : row + end])
        row += query_len


def test_bits_do_not_depend_on_the_chip_in_invariant_mode() -> None:
    """How many processors there are decides only the fast mode."""
    case = make_case([(530, 2), (40, 9)], 3, 1, 32)
    assert torch.equal(case.attend(num_processors=1), case.attend(num_processors=1000))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_passed_on(value: float) -> None:
    """A query that is not finite gives its own row NaN, so that it is noticed, and no other."""
    case = make_case([(20, 3), (520, 3)], 4, 2, 16)
    case.q[1, 2, 5] = case.q[4, 0, 0] = value
    spoilt = case.attend().isnan().any(-1).nonzero().tolist()
    assert spoilt == [[1, 2], [4, 0]]


def test_what_does_not_fit_is_refused() -> None:
    """Sizes and types that no table lists are named."""
    with pytest.raises(ValueError, match="heads of 72 values"):
        make_case([(0, 1)], 2, 1, 72).attend()
    for dtype, limit in ((FP32, 32), (BF16, 64)):
        with pytest.raises(ValueError, match=f"at most {limit} are supported"):
            make_case([(0, 1)], limit + 1, 1, 64, dtype).attend()
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        make_case([(0, 1)], 2, 1, 64, FP32, "int8").attend()
    case = make_case([(0, 1)], 2, 1, 64, BF16)
    with pytest.raises(ValueError, match="does not fit activations"):
        Case(case.q.half(), case.k_cache, case.v_cache, None, None, [1], [0], case.tables).attend()
