"""Products in int8 and int4: what is rounded and how, in C++ as in torch, and no company felt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider_kernels.quantise import GROUP, quantise_nibbles, quantise_rows, quantise_weight
from tests.support.implementations import IMPLEMENTATIONS, ops_of

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_isa = pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
each_rounding = pytest.mark.parametrize("rounding", ["int8", "int4"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(576, 960), (1536, 70), (100, 37), (7, 1), (1, 33)]
each_shape = pytest.mark.parametrize(("num_in", "num_out"), SHAPES)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each test once with one thread and once with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def case(
    num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of which some columns are huge, a weight [out, in] and a bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, num_in, generator=generator)
    x[:, ::50] *= 100
    x[3, :GROUP] = 0.0
    x[5] *= 1e-35
    x[6] *= 1e30
    weight = torch.randn(num_out, num_in, generator=generator)
    weight[num_out // 2, :GROUP] = 0.0
    return x.to(dtype), weight.to(dtype), torch.randn(num_out, generator=generator)


def quantise(
    weight: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, and what a value of 1 and of 0 stand for in each group."""
    if rounding == "int4":
        return quantise_nibbles(weight)
    values, scales = quantise_weight(weight)
    return values, scales, torch.zeros_like(scales)


def widened(weight: torch.Tensor, rounding: str) -> torch.Tensor:
    """The weight [out, in] as it was rounded."""
    values, steps, lowest = (part.float() for part in quantise(weight, rounding))
    return (values * steps[..., None] + lowest[..., None]).flatten(1)[:, : weight.shape[1]]


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rounding: str
) -> torch.Tensor:
    """Whole sums in a group, and one chain of multiply-adds over the groups."""
    rows, row_scales = quantise_rows(x)
    columns, steps, lowest = quantise(weight, rounding)
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for group in range(rows.shape[1]):
        whole = rows[:, group].double() @ columns[:, group].double().t()
        scales = row_scales[:, group, None] * steps[:, group].float()
        # A fused multiply-add rounds once; so does this, but for one case in 2**29.
        sums = (sums.double() + whole * scales.double()).float()
        totals = rows[:, group].sum(1) * row_scales[:, group]
        rest = totals[:, None].double() * lowest[:, group].double()
        sums = (sums.double() + rest).float()
    return (sums + bias).to(x.dtype)


@each_rounding
@each_dtype
@each_shape
@pytest.mark.parametrize("isa", [isa for isa in IMPLEMENTATIONS[1:] if isa != "generic"])
def test_compiled_products_have_the_bits_of_their_definition(
    isa: str, num_in: int, num_out: int, dtype: torch.dtype, rounding: str
) -> None:
    """With every instruction set, whatever rows and weights are like."""
    x, weight, bias = case(num_in, num_out, dtype)
    ops = ops_of(isa, rounding=rounding)
    assert torch.equal(ops.linear(x, ops.pack(weight), bias), reference(x, weight, bias, rounding))


@each_rounding
@each_dtype
@each_shape
@pytest.mark.parametrize("implementation", ["torch", "generic"])
def test_the_others_are_as_close_as_rounding_allows(
    implementation: str, num_in: int, num_out: int, dtype: torch.dtype, rounding: str
) -> None:
    """Without a fused multiply-add, and in torch: the same numbers but for the order of sums."""
    x, weight, bias = case(num_in, num_out, dtype)
    ops = ops_of(implementation, rounding=rounding)
    found, expected = ops.linear(x, ops.pack(weight), bias), reference(x, weight, bias, rounding)
    # Against the largest of the row: sums of huge numbers may nearly cancel.
    error = (found.double() - expected.double()).abs().amax(1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (error <= tolerance * expected.double().abs().amax(1)).all()


@pytest.mark.usefixtures("threads")
@each_rounding
@each_dtype
@each_shape
@each_implementation
def test_rows_do_not_feel_their_company(
    implementation: str, num_in: int, num_out: int, dtype: torch.dtype, rounding: str
) -> None:
    """1 to 20 rows at any place, and many: one result."""
    x, weight, bias = case(num_in, num_out, dtype)
    ops = ops_of(implementation, rounding=rounding)
    packed = ops.pack(weight)
    whole = ops.linear(x, packed, bias)
    assert whole.dtype == dtype
    begin = 0
    for num_rows in range(1, 20):
        end = begin + num_rows
        assert torch.equal(ops.linear(x[begin:end], packed, bias), whole[begin:end])
        begin = end
    assert torch.equal(ops.linear(x[13:190], packed, bias), whole[13:190])
    assert ops.linear(x[:0], packed, bias).shape == (0, num_out)


@pytest.mark.parametrize(("rounding", "tolerance"), [("int8", 0.02), ("int4", 0.12)])
@each_dtype
@each_implementation
def test_they_are_close_to_the_product(
    implementation: str, dtype: torch.dtype, rounding: str, tolerance: float
) -> None:
    """Within a few percent of its size, though some columns are a hundred times the others."""
    x, weight, bias = case(576, 960, dtype)
    ops = ops_of(implementation, rounding=rounding)
    expected = x.double() @ weight.double().t() + bias
    found = ops.linear(x, ops.pack(weight), bias)
    errors = (found - expected).square().mean(1) / expected.square().mean(1)
    assert (errors.sqrt() < tolerance).all()


@each_rounding
@each_dtype
@each_shape
@each_implementation
def test_a_weight_is_looked_up_in_as_it_was_rounded(
    implementation: str, num_in: int, num_out: int, dtype: torch.dtype, rounding: str
) -> None:
    """In the dtype of the weight; each value within half a step."""
    weight = case(num_in, num_out, dtype)[1]
    ops = ops_of(implementation, rounding=rounding)
    packed = ops.pack(weight)
    ids = torch.randint(num_out, (50,), generator=torch.Generator().manual_seed(0))
    found = ops.lookup(packed, ids)
    expected = widened(weight, rounding)
    assert torch.equal(found, expected.to(dtype)[ids])
    _, steps, lowest = (part.float() for part in quantise(weight, rounding))
    # The lowest and the step are rounded as well, to 11 bits.
    limits = (0.51 * steps + 1e-3 * lowest.abs()).repeat_interleave(GROUP, 1)[:, :num_in]
    assert ((expected - weight.float()).abs() <= limits).all()
    each = {"int8": GROUP + 2, "int4": GROUP // 2 + 4}[rounding]  # bytes of a column's group
    assert packed.nbytes <= -(-num_in // GROUP) * -(-num_out // 32) * 32 * each


def test_weights_of_16_steps_come_out_as_they_were() -> None:
    """As a Q4_1 file has them, also in bfloat16 where the group's ends came from there."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (50, 4, GROUP), generator=generator, dtype=torch.uint8)
    values[..., 0], values[..., 1] = 0, 15
    steps = torch.rand(50, 4, generator=generator).half() / 100
    part = 0.3 + 0.4 * torch.rand(50, 4, generator=generator)  # below zero
    lowest = -(15.0 * steps.float() * part).bfloat16().half()
    weight = (values.float() * steps.float()[..., None] + lowest.float()[..., None]).flatten(1)
    assert all(map(torch.equal, quantise_nibbles(weight), (values, steps, lowest)))
    ends = weight.view(50, 4, GROUP)[..., 1].bfloat16().float()
    steps = ((ends - lowest.float()) / 15.0).half()
    weight = (values.float() * steps.float()[..., None] + lowest.float()[..., None]).flatten(1)
    found = quantise_nibbles(weight.bfloat16())
    assert torch.equal(found[0], values) and torch.equal(found[2], lowest)
    torch.testing.assert_close(found[1], steps, rtol=1e-3, atol=0)  # one bit of its eleven


def test_groups_are_rounded_by_their_largest() -> None:
    """127 steps for it; zeros and nearly nothing are zero; NaN and infinity make no number."""
    x = torch.zeros(6, 2 * GROUP)
    x[0, 3], x[0, 4], x[0, GROUP] = -254.0, 3.0, 1.0
    x[1, 0] = 1e-38
    x[2, 1], x[3, 1] = torch.nan, torch.inf
    values, scales = quantise_rows(x)
    assert values[0, 0, 3:5].tolist() == [-127, 2]  # 1.5, to even
    assert scales[0].tolist() == pytest.approx([2.0, 1 / 127])
    assert values[1:].abs().max() == 0 and scales[1].tolist() == [0.0, 0.0]
    assert scales[2:4].isnan().tolist() == [[True, False]] * 2
    values, scales = quantise_weight(x)
    assert scales[2:4].isnan().tolist() == [[True, False]] * 2
    assert values.abs().max() <= 127 and not values[4:].any()


def test_groups_of_nibbles_begin_at_their_lowest() -> None:
    """15 steps above it is the largest; equal values have no step; what is no number is NaN."""
    weight = torch.zeros(6, GROUP + 3)
    weight[0, :3] = torch.tensor([-1.0, 2.0, 0.52])
    weight[1] = 0.25
    weight[2, 1], weight[3, 1], weight[4, 1] = torch.nan, torch.inf, -70000.0
    weight[5, GROUP:] = torch.tensor([3.0, 1.0, 2.0])
    values, steps, lowest = quantise_nibbles(weight)
    assert values[0, 0, :4].tolist() == [0, 15, 8, 5]
    assert (float(steps[0, 0]), float(lowest[0, 0])) == (pytest.approx(0.2, rel=1e-3), -1.0)
    assert not values[1].any() and steps[1].tolist() == [0, 0] and lowest[1].tolist() == [0.25] * 2
    assert lowest[2:5].isnan().tolist() == [[True, False]] * 3
    assert values[5, 1].tolist() == [15, 0, *[8] * 30] and lowest[5, 1] == 1.0


@each_rounding
@each_implementation
def test_nan_and_infinity_stay_in_their_rows_and_columns(
    implementation: str, rounding: str
) -> None:
    """A row that is no number spoils itself, and a weight its own column."""
    ops = ops_of(implementation, rounding=rounding)
    x, weight = torch.ones(20, 40), torch.ones(70, 40)
    x[3, 39] = torch.nan
    x[15, 0] = torch.inf
    weight[69, 2] = torch.nan
    bad = ~ops.linear(x, ops.pack(weight), None).isfinite()
    assert bad.all(1).nonzero().flatten().tolist() == [3, 15]
    assert bad.all(0).nonzero().flatten().tolist() == [69]
    assert int(bad.sum()) == 2 * 70 + 18


@each_rounding
@each_isa
def test_the_largest_sums_fit(isa: str, rounding: str) -> None:
    """Every product as large as can be, of either sign."""
    ops = ops_of(isa, rounding=rounding)
    x = torch.ones(3, 64) * torch.tensor([[1.0], [-1.0], [1.0]])
    weight = torch.ones(40, 64) * torch.tensor([1.0, -1.0]).repeat(20)[:, None]
    weight[:, 0] = 0.0  # else a group had no step
    found = ops.linear(x, ops.pack(weight), None)
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-2, atol=0)
