"""Matrix products in C++: right, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider_kernels.native_linear import StripWeight
from tests.support.implementations import IMPLEMENTATIONS, library, ops_of

SHAPES = [(576, 960), (1536, 576), (100, 37), (7, 1), (1, 33)]
each_isa = pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
each_shape = pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]
"""Of rows and of weights; the last is a head's."""
each_dtype = pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each test once with one thread and once with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def case(
    num_in: int, num_out: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight [out, in] and a bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, num_in, generator=generator).to(dtype)
    weight = torch.randn(num_out, num_in, generator=generator).to(weight_dtype)
    return x, weight, torch.randn(num_out, generator=generator)


@pytest.mark.usefixtures("threads")
@each_dtype
@each_shape
@each_isa
def test_rows_do_not_feel_their_company(
    isa: str, num_in: int, num_out: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """1 to 40 rows, and 1,000, at any place: one result, and it is the matrix product."""
    x, weight, bias = case(num_in, num_out, dtype, weight_dtype)
    ops = ops_of(isa)
    packed = ops.pack(weight)
    whole = ops.linear(x, packed, bias)
    assert whole.dtype == dtype
    expected = x.double() @ weight.double().t() + bias
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=1e-3)
    begin = 0
    for num_rows in range(1, 41):
        end = begin + num_rows
        assert torch.equal(ops.linear(x[begin:end], packed, bias), whole[begin:end])
        begin = end
    assert torch.equal(ops.linear(x[13:600], packed, bias), whole[13:600])
    assert ops.linear(x[:0], packed, bias).shape == (0, num_out)


@each_dtype
def test_threads_and_instruction_sets_give_the_same_bits(
    threads: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """One chain of multiply-adds for each element, in the order of the inputs."""
    x, weight, bias = case(100, 37, dtype, weight_dtype)
    sums = torch.zeros(9, 37, dtype=torch.float32)
    for i in range(100):  # exact in float64, so rounded once, as a fused one is
        column = x[:9, i, None].double() * weight[:, i].double()
        sums = (sums.double() + column).float()
    expected = (sums + bias).to(dtype)
    for isa in ("avx2", "avx512"):
        ops = ops_of(isa)
        found = ops.linear(x[:9], ops.pack(weight), bias)
        # Rounding to float64 first makes a difference once in 2**29.
        assert torch.equal(found, expected)


@each_isa
@each_shape
def test_a_packed_table_is_looked_up_in(isa: str, num_in: int, num_out: int) -> None:
    """Rows of the original matrix, exactly, in any order."""
    weight = case(num_in, num_out, torch.float32, torch.bfloat16)[1]
    ops = ops_of(isa)
    ids = torch.randint(num_out, (50,), generator=torch.Generator().manual_seed(0))
    found = ops.lookup(ops.pack(weight), ids)
    assert found.is_contiguous() and torch.equal(found, weight[ids])


@each_isa
def test_nan_and_infinity_stay_in_their_rows_and_columns(isa: str) -> None:
    """A row that is no number spoils itself, and a weight its own column."""
    ops = ops_of(isa)
    x, weight = torch.ones(20, 40), torch.ones(70, 40)
    x[3, 39] = torch.nan
    x[15, 0] = torch.inf
    weight[69, 2] = torch.nan
    bad = ~ops.linear(x, ops.pack(weight), None).isfinite()
    assert bad.all(1).nonzero().flatten().tolist() == [3, 15]
    assert bad.all(0).nonzero().flatten().tolist() == [69]
    assert int(bad.sum()) == 2 * 70 + 18


def test_what_does_not_fit_is_refused() -> None:
    """Other widths, dtypes and biases: an error, not a wild pointer."""
    library("generic")
    ops = ops_of("generic")
    weight = ops.pack(torch.ones(5, 8))
    x, bias = torch.ones(2, 8), torch.ones(5)
    for wrong in (
        (torch.ones(2, 7), weight, bias),
        (x.double(), weight, bias),
        (x, StripWeight(torch.ones(1, 8, 32).half(), "float16", 8, 5, torch.float16), bias),
        (x, weight, torch.ones(4)),
        (x, weight, bias.bfloat16()),
    ):
        with pytest.raises(ValueError, match="fit|float32"):
            ops.linear(*wrong)
