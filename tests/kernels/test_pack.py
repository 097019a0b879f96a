"""Packing in C++: the numbers of the checkpoint, in strips, rounded as plain torch rounds them."""

from __future__ import annotations

import pytest
import torch

from outrider_kernels import native_linear
from outrider_kernels.native_linear import STRIP
from outrider_kernels.quantise import GROUP, quantise_nibbles, quantise_weight
from tests.support.implementations import IMPLEMENTATIONS, library

SHAPES = [(64, 64), (96, 5), (37, 100), (1, 33), (576, 32)]
each_shape = pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def matrix(num_in: int, num_out: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size that a weight could have, [out, in]."""
    generator = torch.Generator().manual_seed(num_in * 1000 + num_out)
    sizes = torch.empty(num_out, num_in).uniform_(-12, 4, generator=generator)
    return (torch.randn(num_out, num_in, generator=generator) * 10**sizes).to(dtype)


def packed(weight: torch.Tensor, rounding: str | None = None) -> torch.Tensor:
    """The strips."""
    found = native_linear.pack(library(IMPLEMENTATIONS[1]), weight, rounding=rounding)
    assert (found.num_out, found.num_in) == weight.shape and found.dtype == weight.dtype
    return found.strips


def bytes_and_scales(strips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of packed int8: values [out, groups, GROUP] and scales [out, groups], padding included."""
    num_strips, num_groups, _ = strips.shape
    values = strips[..., : GROUP * STRIP].view(num_strips, num_groups, GROUP // 4, STRIP, 4)
    values = (values ^ 0x80).view(torch.int8).permute(0, 3, 1, 2, 4)
    scales = strips[..., GROUP * STRIP :].view(torch.bfloat16).transpose(1, 2)
    return values.reshape(-1, num_groups, GROUP), scales.reshape(-1, num_groups)


def nibbles_steps_and_lowest(strips: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of packed int4, as bytes_and_scales; scales as bits."""
    num_strips, num_groups, _ = strips.shape
    num_bytes = GROUP // 2 * STRIP
    both = strips[..., :num_bytes].view(num_strips, num_groups, GROUP // 8, STRIP, 4)
    values = torch.stack([both & 15, both >> 4], 3).permute(0, 4, 1, 2, 3, 5)
    scales = strips[..., num_bytes:].view(torch.int16).view(num_strips, num_groups, 2, STRIP)
    steps, lowest = scales.transpose(1, 3).reshape(-1, 2, num_groups).unbind(1)
    return values.reshape(-1, num_groups, GROUP), steps, lowest


def assert_nibbles_as_in_torch(weight: torch.Tensor) -> None:
    """The same bits in values, steps and lowest values."""
    num_out = weight.shape[0]
    expected = quantise_nibbles(weight)
    found = nibbles_steps_and_lowest(packed(weight, "int4"))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[:num_out], theirs.view(ours.dtype))


@each_dtype
@each_shape
def test_nibbles_are_rounded_as_in_torch(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    """Numbers of every size, most of them below float16's smallest, and numbers as weights are."""
    weight = matrix(num_in, num_out, dtype)
    assert_nibbles_as_in_torch(weight)
    assert_nibbles_as_in_torch(weight * 1e-4)
    assert_nibbles_as_in_torch(weight.float().sign().to(dtype) * weight.abs() ** 0.1)


@each_dtype
@each_shape
def test_columns_stand_side_by_side(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    """Every number once, and zeros for the columns that the last strip has too many."""
    weight = matrix(num_in, num_out, dtype)
    columns = packed(weight).transpose(1, 2).reshape(-1, num_in)
    assert torch.equal(columns[:num_out], weight)
    assert not columns[num_out:].any()


@each_dtype
@each_shape
def test_bytes_are_rounded_as_in_torch(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    """The same bits in values and scales; what is no input and no column is zero."""
    weight = matrix(num_in, num_out, dtype)
    values, scales = bytes_and_scales(packed(weight, "int8"))
    expected_values, expected_scales = quantise_weight(weight)
    assert torch.equal(values[:num_out], expected_values)
    assert torch.equal(scales[:num_out], expected_scales)
    assert not values[num_out:].any() and not scales[num_out:].any()


@each_dtype
@pytest.mark.parametrize(
    "value", [torch.inf, -torch.inf, torch.nan, 0.0, 1e-39, -3e38, 65519.0, 65520.0, -65520.0]
)
def test_groups_of_what_is_hard_to_round(value: float, dtype: torch.dtype) -> None:
    """A group with no number has no scale; zeros, tiny and huge numbers go as in torch, each alone
    among usual ones, alone among zeros, and as a whole group."""
    weight = matrix(3 * GROUP, 40, dtype)
    weight[7, GROUP + 5] = value
    weight[20, :GROUP] = value
    weight[30, :GROUP] = 0.0
    weight[30, 3] = value
    values, scales = bytes_and_scales(packed(weight, "int8"))
    expected_values, expected_scales = quantise_weight(weight)
    assert torch.equal(values[:40], expected_values)
    torch.testing.assert_close(scales[:40], expected_scales, rtol=0, atol=0, equal_nan=True)
    assert_nibbles_as_in_torch(weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_another_type_is_refused(dtype: torch.dtype) -> None:
    """Before a byte of it is read as something else."""
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        packed(torch.ones(4, 4, dtype=dtype), "int8")
