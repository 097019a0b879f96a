"""A matrix is kept in 4 bits where not one of its weights changes, and in 8 bits elsewhere."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels.quantise import EITHER
from tests.support.implementations import IMPLEMENTATIONS, ops_of
from tests.support.sixteen_levels import sixteen_levels

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(64, 64), (96, 5), (37, 100), (1, 33), (576, 32)]
each_shape = pytest.mark.parametrize(("num_in", "num_out"), SHAPES)


def kept_in(implementation: str, weight: torch.Tensor) -> str:
    """int4 or int8; its columns are what that rounding by name makes of it, bit for bit."""
    packed = ops_of(implementation, rounding=EITHER).pack(weight)
    named = ops_of(implementation, rounding=packed.type)
    columns = torch.arange(weight.shape[0])
    found, expected = named.lookup(packed, columns), named.lookup(named.pack(weight), columns)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert packed.nbytes == named.pack(weight).nbytes
    assert packed.type == "int8" or torch.equal(found, weight)
    return str(packed.type)


@each_dtype
@each_shape
@each_implementation
def test_16_levels_stay_in_4_bits(
    implementation: str, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    """Whole groups and not, any number of columns; equal weights are one level, and 0 is -0."""
    weight = sixteen_levels(num_out, num_in, dtype)
    assert kept_in(implementation, weight) == "int4"
    weight[weight == 0] = -0.0
    assert kept_in(implementation, weight) == "int4"
    assert kept_in(implementation, torch.full_like(weight, 0.3125)) == "int4"
    assert kept_in(implementation, torch.zeros_like(weight)) == "int4"


@each_dtype
@each_shape
@each_implementation
def test_other_weights_are_kept_in_8_bits(
    implementation: str, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    """Of no levels, or of levels that float16 cannot say."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    levels = sixteen_levels(num_out, num_in, dtype)
    if num_in > 1:
        assert kept_in(implementation, weight) == "int8"
    assert kept_in(implementation, levels * 2.0**-30) == "int8"
    assert kept_in(implementation, levels * 2.0**30) == "int8"


@each_dtype
@pytest.mark.parametrize("place", [(0, 2), (0, 31), (40, 36), (69, 32), (69, 7), (33, 0), (33, 1)])
@each_implementation
def test_one_weight_that_would_change_is_enough(
    implementation: str, place: tuple[int, int], dtype: torch.dtype
) -> None:
    """By a single step of bfloat16, wherever it stands, the last column and group included."""
    weight = sixteen_levels(70, 37, dtype)
    weight[place] = 0.15625  # 13 levels above the lowest
    narrow = weight.bfloat16()
    narrow.view(torch.int16)[place] += 1
    weight = narrow.to(dtype)
    assert kept_in(implementation, weight) == "int8"


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 65520.0, -3e38])
@each_implementation
def test_what_4_bits_cannot_say_is_never_kept_in_them(
    implementation: str, value: float, dtype: torch.dtype
) -> None:
    """No number, or too large a one, among others or alone in its column."""
    weight = sixteen_levels(70, 37, dtype)
    weight[69, 3] = value
    assert kept_in(implementation, weight) == "int8"
    assert kept_in(implementation, torch.full((33, 64), value, dtype=dtype)) == "int8"


@each_implementation
def test_tables_are_never_kept_in_4_bits(implementation: str) -> None:
    """In 8, whatever their weights are."""
    ops = ops_of(implementation, rounding=EITHER)
    assert ops.pack_table(sixteen_levels(64, 64, torch.bfloat16)).type == "int8"
