"""Norm, add and norm, SwiGLU: equal to plain torch, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels import elementwise
from outrider_kernels.triton_ops import rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for one rounding to the type."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 10)


@each_dtype
@pytest.mark.parametrize("width", [1, 63, 64, 576, 1000, 4096])
def test_norm_equals_the_reference(dtype: torch.dtype, width: int) -> None:
    """Widths of all kinds, the unaligned ones too."""
    x, weight = random(3, width, dtype=dtype), random(width, seed=1)
    assert_close(rows.rms_norm(x, weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5))


@each_dtype
def test_norm_of_heads_that_lie_apart(dtype: torch.dtype) -> None:
    """Query and key norms: parts with weights of their own, rows inside wider ones."""
    qkv, weight = random(4, 7, 80, dtype=dtype), random(5, 80, seed=1)
    got = rows.rms_norm(qkv[:, :5], weight, 1e-6)
    assert_close(got, elementwise.rms_norm(qkv[:, :5], weight, 1e-6))


@each_dtype
@pytest.mark.parametrize("width", [40, 577])
def test_add_and_norm_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    """The residual holds the rounded sum, bit for bit, and the norm is the sum's."""
    x, weight = random(3, width, dtype=dtype), random(width, seed=1)
    residual = random(3, width, dtype=dtype, seed=2)
    expected_residual = residual.clone()
    expected = elementwise.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(rows.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@each_dtype
@pytest.mark.parametrize("width", [1, 100, 1024, 1537])
def test_silu_mul_equals_the_reference(dtype: torch.dtype, width: int) -> None:
    """Blocks that are full, cut, or unaligned."""
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    assert_close(rows.silu_mul(gate_up), elementwise.silu_mul(gate_up))


def test_silu_mul_of_huge_gates() -> None:
    """No overflow: silu is 0 on the far left and the gate on the far right."""
    huge = torch.tensor([[-1e30, -200.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(rows.silu_mul(huge), torch.tensor([[0.0, 0.0, 0.0, 100.0]]))


def test_no_rows_are_no_work() -> None:
    """A step may be empty."""
    assert rows.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert rows.silu_mul(torch.empty(0, 64)).shape == (0, 32)


@each_dtype
def test_rows_do_not_feel_their_company(dtype: torch.dtype) -> None:
    """A row alone has the bits that it has among others."""
    x, weight = random(5, 576, dtype=dtype), random(576, seed=1)
    norm, silu = rows.rms_norm(x, weight, 1e-5), rows.silu_mul(x)
    for i in range(5):
        assert torch.equal(rows.rms_norm(x[i : i + 1], weight, 1e-5), norm[i : i + 1])
        assert torch.equal(rows.silu_mul(x[i : i + 1]), silu[i : i + 1])


def test_numbers_that_are_none_stay_in_their_row() -> None:
    """NaN in a row gives that row NaN, and no other."""
    x = random(3, 64)
    x[1, 5] = torch.nan
    assert rows.rms_norm(x, torch.ones(64), 1e-5).isnan().any(-1).tolist() == [False, True, False]


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, types and sizes that no table lists are named."""
    for width, limit in ((16392, 16384), (1025, 1024)):
        with pytest.raises(ValueError, match=f"at most {limit}"):
            rows.rms_norm(torch.empty(1, width), torch.ones(width), 1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        rows.rms_norm(torch.empty(1, 64), torch.ones(32), 1e-5)
    with pytest.raises(ValueError, match="not torch.float64"):
        rows.silu_mul(torch.empty(1, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="residual"):
        rows.add_rms_norm(torch.empty(1, 64), torch.empty(2, 64), torch.ones(64), 1e-5)
