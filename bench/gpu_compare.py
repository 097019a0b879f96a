"""Checks of a GPU's kernels: a name, how wrong a result is, and how wrong it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

Checks = Iterator[tuple[str, Callable[[], float], float]]
"""Name, what computes the error, and the largest allowed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; `error` is relative, of the whole, or a number of things that differ."""

    name: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """False for NaN, too."""
        return self.error <= self.allowed


def run_checks(checks: Iterable[tuple[str, Callable[[], float], float]]) -> list[Check]:
    """All of them; one that raises is an error of infinity, and the others go on."""
    found = []
    for name, error_of, allowed in checks:
        try:
            error = error_of()
        except Exception as error_raised:
            print(f"{name}: {error_raised}", flush=True)
            error = float("inf")
        found.append(Check(name, error, allowed))
    return found


def name_of(dtype: torch.dtype) -> str:
    """Without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole, relative; expected is on the CPU."""
    found, expected = found.cpu().double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal float32 on the CPU, the same everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
