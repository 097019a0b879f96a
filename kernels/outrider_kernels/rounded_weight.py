"""Matrices rounded in groups of inputs, as plain torch multiplies with them: [in, out]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from outrider_kernels.quantise import GROUP, quantise_nibbles, quantise_weight


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix rounded to int8, with a scale for each group of inputs of a column."""

    type: ClassVar[str] = "int8"
    values: torch.Tensor
    """int8 [in, out]; inputs are padded to whole groups."""
    scales: torch.Tensor
    """bfloat16 [groups, out]."""
    num_in: int
    dtype: torch.dtype
    """Of the matrix that was rounded, and of what is looked up."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Int8Weight:
        """From [out, in], as checkpoints hold it."""
        values, scales = quantise_weight(weight)
        return Int8Weight(_packed(values), _packed(scales), weight.shape[1], weight.dtype)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def shape(self) -> torch.Size:
        """[in, out], without the padding."""
        return torch.Size((self.num_in, self.values.shape[1]))

    @property
    def padded_in(self) -> int:
        """Inputs with the padding."""
        return self.scales.shape[0] * GROUP

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    def widen(self, columns: slice | torch.Tensor, out: torch.Tensor) -> None:
        """Write some columns as float32 into out [in with padding, n]."""
        out.copy_(self.values[:, columns])
        out.view(-1, GROUP, out.shape[1]).mul_(self.scales[:, None, columns].float())


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix rounded to 16 steps above the lowest value of each group of inputs of a column."""

    type: ClassVar[str] = "int4"
    values: torch.Tensor
    """uint8 [in / 2, out]: of each group the first half in the low nibbles, the second in the high
    ones; inputs are padded to whole groups."""
    steps: torch.Tensor
    """float16 [groups, out], like `lowest`."""
    lowest: torch.Tensor
    num_in: int
    dtype: torch.dtype
    """Of the matrix that was rounded, and of what is looked up."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Int4Weight:
        """From [out, in], as checkpoints hold it."""
        values, steps, lowest = quantise_nibbles(weight)
        first, second = torch.split(values, GROUP // 2, -1)
        return Int4Weight(
            _packed(first | second << 4),
            _packed(steps),
            _packed(lowest),
            weight.shape[1],
            weight.dtype,
        )

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.steps.nbytes + self.lowest.nbytes

    @property
    def shape(self) -> torch.Size:
        """[in, out], without the padding."""
        return torch.Size((self.num_in, self.values.shape[1]))

    @property
    def padded_in(self) -> int:
        """Inputs with the padding."""
        return self.steps.shape[0] * GROUP

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    def widen(self, columns: slice | torch.Tensor, out: torch.Tensor) -> None:
        """Write some columns as float32 into out [in with padding, n]."""
        both = self.values[:, columns].view(-1, GROUP // 2, out.shape[1])
        groups = out.view(-1, GROUP, out.shape[1])
        groups[:, : GROUP // 2].copy_(both & 15)
        groups[:, GROUP // 2 :].copy_(both >> 4)
        groups.mul_(self.steps[:, None, columns].float())
        groups.add_(self.lowest[:, None, columns].float())


RoundedWeight = Int8Weight | Int4Weight


def pack_either(weight: torch.Tensor) -> RoundedWeight:
    """From [out, in]: in int4 where that gives every weight back, else in int8."""
    return Int4Weight.pack(weight) if is_exact_in_int4(weight) else Int8Weight.pack(weight)


def is_exact_in_int4(weight: torch.Tensor) -> bool:
    """Whether int4 gives every weight of [out, in] back, in its dtype; NaN: never."""
    values, steps, lowest = quantise_nibbles(weight)
    wide = values * steps.float()[..., None] + lowest.float()[..., None]
    return torch.equal(wide.flatten(1)[:, : weight.shape[1]].to(weight.dtype), weight)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[n, out] from [out, ...]."""
    return x.flatten(1).t().contiguous()
