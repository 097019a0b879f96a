"""Linear and the small operations: right, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from outrider_kernels.elementwise import rms_norm, rotary, silu_mul
from outrider_kernels.linear import RowPlan, linear
from outrider_kernels.ops import Ops
from tests.support.implementations import IMPLEMENTATIONS, ops_of

PARTS = [(0, 1), (0, 8), (7, 8), (5, 14), (30, 63), (100, 612), (0, 612), (399, 1000)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each test once with one thread and once with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("plan", [RowPlan(), RowPlan(tile_rows=32)], ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (100, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_rows_do_not_feel_their_company(
    plan: RowPlan, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    """1 to 1,000 rows, any place in them: one result, and it is the matrix product."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, num_in, generator=generator).to(dtype)
    weight = torch.randn(num_in, num_out, generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator)
    whole = linear(x, weight, bias, plan)
    expected = x.float() @ weight.float() + bias
    if dtype == torch.bfloat16:  # from bfloat16 numbers, and rounded only if the input was
        torch.testing.assert_close(linear(x.float(), weight, bias, plan), expected, rtol=1e-4,
                                   atol=1e-3)  # fmt: skip
        torch.testing.assert_close(whole.float(), expected, rtol=5e-3, atol=1e-3)
    else:
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-3)
    for begin, end in PARTS:
        assert torch.equal(linear(x[begin:end], weight, bias, plan), whole[begin:end])


def test_linear_keeps_within_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product ever has fewer or more rows than the plan allows, and no rows need none."""
    heights: list[int] = []
    product = torch.mm

    def spy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heights.append(x.shape[0])
        return product(x, weight)

    monkeypatch.setattr(torch, "mm", spy)
    x, weight = torch.ones(1100, 4), torch.ones(4, 3)
    for num_rows in (1, 7, 8, 9, 511, 512, 513, 1025, 1100):
        assert linear(x[:num_rows], weight, None, RowPlan()).shape == (num_rows, 3)
        linear(x[:num_rows], weight, None, RowPlan(tile_rows=32))
    assert min(heights) == 8
    assert max(heights) == 512
    heights.clear()
    for plan in (RowPlan(), RowPlan(tile_rows=32)):
        for dtype in (torch.float32, torch.bfloat16):
            nothing = linear(x[:0].to(dtype), weight.to(dtype), torch.ones(3), plan)
            assert (nothing.shape, nothing.dtype) == ((0, 3), dtype)
    assert heights == []


def rotated(ops: Ops, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of x [rows, 4 * width], each row with angles of its own."""
    heads = x.view(x.shape[0], 4, -1)
    angles = x[:, None, : heads.shape[2]].float()
    slots = torch.arange(x.shape[0]).flip(0)
    shape = (1, x.shape[0], 1, heads.shape[2])
    k_cache, v_cache = torch.full(shape, torch.nan).to(x), torch.full(shape, torch.nan).to(x)
    q = ops.rotate_and_write(
        heads[:, :3], heads[:, 3:], angles.cos(), angles.sin(), k_cache, v_cache, slots
    )
    return torch.cat([q.flatten(1), k_cache[0, slots, 0], v_cache[0, slots, 0]], -1)


OPERATIONS: dict[str, Callable[[Ops, torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, torch.linspace(1, 2, x.shape[1]), 1e-5),
    "rms_norm_of_heads": lambda ops, x: ops.rms_norm(
        x.view(x.shape[0], 4, -1)[:, :3], torch.linspace(1, 2, x.shape[1] // 4 * 3).view(3, -1), 0.1
    ).flatten(1),
    "silu_mul": lambda ops, x: ops.silu_mul(x),
    "rotate_and_write": rotated,
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [64, 104, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@each_operation
def test_small_operations_do_not_feel_their_company(
    operation: str, implementation: str, width: int, dtype: torch.dtype
) -> None:
    """Same bits at any place, in widths that are and are not multiples of a vector."""
    ops, op = ops_of(implementation), OPERATIONS[operation]
    x = (4 * torch.randn(1000, width, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = op(ops, x)
    assert whole.dtype == dtype
    for begin, end in PARTS:
        assert torch.equal(op(ops, x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("width", [64, 104])
@pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
@each_operation
def test_compiled_small_operations_agree_with_torch(operation: str, isa: str, width: int) -> None:
    """The same numbers but for rounding, on small, large and huge ones."""
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    if operation != "rotate_and_write":  # whose sums of two products may nearly cancel
        x *= torch.logspace(-4, 4, 40)[:, None]
        x[5] = 0.0
        x[7, ::3] = -1e6
    op = OPERATIONS[operation]
    plain, compiled = op(ops_of("torch"), x), op(ops_of(isa), x)
    torch.testing.assert_close(compiled, plain, rtol=2e-6, atol=1e-6)
    narrow = x.bfloat16()
    plain, compiled = op(ops_of("torch"), narrow), op(ops_of(isa), narrow)
    torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-6)


@each_operation
def test_small_operations_have_the_same_bits_with_avx2_and_avx512(operation: str) -> None:
    """Registers of another width change nothing, on machines that have both."""
    x = torch.randn(40, 104, generator=torch.Generator().manual_seed(0))
    outs = [OPERATIONS[operation](ops_of(isa), x) for isa in ("avx2", "avx512")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
@each_operation
def test_compiled_small_operations_pass_nan_on(operation: str, isa: str) -> None:
    """A number that is none spoils its own row, so that it is noticed, and no other."""
    x = torch.ones(20, 64)
    x[3, 17] = x[4, 50] = torch.nan
    spoilt = OPERATIONS[operation](ops_of(isa), x).isnan().any(1)
    assert spoilt.nonzero().flatten().tolist() == (
        [3, 4] if operation != "rms_norm_of_heads" else [3]
    )


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
def test_norm_weights_may_lie_apart(isa: str) -> None:
    """What is read is a copy that lives as long as the call."""
    weights = torch.linspace(1, 2, 192)
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    apart = ops_of(isa).rms_norm(x, weights[::2], 1e-5)
    assert torch.equal(apart, ops_of(isa).rms_norm(x, weights[::2].clone(), 1e-5))


def test_small_operations_are_what_they_are_called() -> None:
    """Close to torch's own forms."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 96, generator=generator), torch.randn(96, generator=generator)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5))
    torch.testing.assert_close(silu_mul(x), F.silu(x[:, :48]) * x[:, 48:])
    huge = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(huge), torch.tensor([[0.0, 0.0, 0.0, 100.0]]))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    """Halves (a, b) become (a cos - b sin, b cos + a sin)."""
    angle = torch.rand(5, 1, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1))
    a, b = x.chunk(2, -1)
    expected = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    cos = torch.cat([angle.cos(), angle.cos()], -1)
    signed_sin = torch.cat([-angle.sin(), angle.sin()], -1)
    torch.testing.assert_close(rotary(x, cos, signed_sin), expected)
