"""Matrix products: equal to plain torch on what weights stand for, the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_products import meaning
from outrider_kernels import rounded_weight
from outrider_kernels.quantise import quantise_rows
from outrider_kernels.triton_ops import linear
from outrider_kernels.triton_ops.configs_linear import KINDS
from outrider_kernels.triton_ops.gpu_weight import lookup, pack, pack_either

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(
    rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations with a few huge columns, a weight [out, in], and a bias."""
    generator = torch.Generator().manual_seed(rows + num_in)
    x = torch.randn(rows, num_in, generator=generator)
    x[:, ::29] *= 20
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    bias = torch.randn(num_out, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The product in float64."""
    if kind == "int8_rows":
        values, scales = quantise_rows(x)
        x = (values * scales[..., None]).flatten(1)[:, : x.shape[1]]
    return x.double() @ meaning(weight, kind).double().T


@each_kind
@each_dtype
@pytest.mark.parametrize("shape", [(1, 64, 32), (5, 100, 37), (35, 288, 50)], ids=str)
def test_products_equal_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, kind: str
) -> None:
    """Groups in pairs and alone, cut groups and cut tiles, in both modes, with a bias."""
    x, weight, bias = make(*shape, dtype)
    expected = reference(x, weight, kind) + bias.double()
    packed = pack(weight, kind)
    for invariant in (True, False):
        got = linear.linear(x, packed, bias, invariant=invariant).double()
        assert (got - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@each_kind
def test_rows_do_not_feel_their_company(kind: str) -> None:
    """In invariant mode a row has the same bits alone, elsewhere in a batch, and among many."""
    x, weight, _ = make(40, 160, 48, torch.bfloat16)
    packed = pack(weight, kind)
    together = linear.linear(x, packed)
    for begin, end in ((0, 1), (3, 8), (7, 40), (39, 40)):
        assert torch.equal(linear.linear(x[begin:end], packed), together[begin:end])


@each_kind
def test_numbers_that_are_none_stay_in_their_row(kind: str) -> None:
    """NaN and infinity in a row spoil that row, and no other."""
    x, weight, _ = make(4, 96, 33, torch.float16)
    x[1, 40], x[2, 95] = torch.nan, torch.inf
    spoiled = ~linear.linear(x, pack(weight, kind)).isfinite().any(-1)
    assert spoiled.tolist() == [False, True, True, False]


@each_dtype
def test_activations_are_rounded_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Values and scales equal those of the reference in every bit; groups of zeros and NaN too."""
    x, _, _ = make(5, 70 * 32, 1, dtype)
    x[1, 40], x[2, 95], x[3], x[4, 32:64] = torch.nan, torch.inf, 0.0, 1e-31
    values, scales = linear.round_activations(x)
    expected_values, expected_scales = quantise_rows(x)
    is_number = ~expected_scales.isnan()
    assert torch.equal(scales.isnan(), ~is_number)
    assert torch.equal(scales[is_number], expected_scales[is_number])
    assert torch.equal(values.view(5, 70, 32)[is_number].float(), expected_values[is_number])


def test_weights_take_the_memory_that_they_should() -> None:
    """Bytes of a parameter: 1 and a scale an output, 1 and 2 a group, a half and 4 a group."""
    weight = torch.randn(64, 640, dtype=torch.bfloat16)
    share = {kind: pack(weight, kind).nbytes / weight.numel() for kind in KINDS}
    assert share["e4m3"] == 1 + 4 / 640
    assert share["int8"] == share["int8_rows"] == 1 + 2 / 32
    assert share["int4"] == 0.5 + 4 / 32


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_logits_are_float32(dtype: torch.dtype) -> None:
    """float32 rows and a narrower weight: rows are rounded like it, and the result is not."""
    x, weight, bias = make(5, 100, 37, dtype)
    wide = x.float() * 1.001
    got = linear.linear(wide, pack(weight), bias)
    expected = wide.to(dtype).double() @ weight.double().T + bias.double()
    assert got.dtype == torch.float32
    assert (got - expected).norm() <= 1e-6 * expected.norm()
    for kind in ("int8_rows", "int4"):
        got = linear.linear(wide, pack(weight, kind), bias)
        expected = reference(wide, weight, kind) + bias.double()
        assert got.dtype == torch.float32
        assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("kind", ["plain", "int8_rows"])
@each_dtype
def test_tables_give_their_rows_back(dtype: torch.dtype, kind: str) -> None:
    """Any rows in any order, as what the packed table stands for, in its type."""
    for num_in in (64, 72, 100):
        _, table, _ = make(1, num_in, 40, dtype)
        rows = torch.tensor([3, 39, 0, 3])
        got = lookup(pack(table, kind), rows)
        assert got.dtype == dtype
        assert torch.equal(got, meaning(table, kind)[rows].to(dtype))
    with pytest.raises(ValueError, match="int4"):
        lookup(pack(table, "int4"), rows)


def test_a_matrix_is_packed_in_four_bits_where_that_loses_nothing() -> None:
    """And else in eight, as the CPU's; the engine is told which."""
    _, weight, _ = make(1, 96, 24, torch.bfloat16)
    exact = torch.arange(96 * 24).view(24, 96) % 16 * torch.ones(1, dtype=torch.bfloat16)
    for matrix in (weight, exact):
        assert pack_either(matrix).type == rounded_weight.pack_either(matrix).type
    assert [pack_either(matrix).kind for matrix in (weight, exact)] == ["int8_rows", "int4"]
    assert [pack(weight.to(dtype)).type for dtype in DTYPES] == ["bfloat16", "float16", "float32"]


def test_no_rows_are_no_work() -> None:
    """A step may be empty."""
    for kind in KINDS:
        packed = pack(torch.ones(8, 32), kind)
        assert linear.linear(torch.empty(0, 32), packed).shape == (0, 8)


def test_what_does_not_fit_is_refused() -> None:
    """Another kind, other inputs, another type, another bias."""
    packed = pack(torch.ones(8, 32))
    with pytest.raises(ValueError, match="only plain"):
        pack(torch.ones(8, 32), "int2")
    with pytest.raises(ValueError, match="32"):
        linear.linear(torch.ones(1, 33), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        linear.linear(torch.ones(1, 32, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="bias"):
        linear.linear(torch.ones(1, 32), packed, torch.ones(9))
