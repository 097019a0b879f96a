"""Notes where the host asks what a tensor holds: on a GPU it would wait there for the device."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ASKING = frozenset(
    (
        "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere",
        "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy",
        "repeat_interleave", "tolist", "unique",
    )
)  # fmt: skip


class Readings(TorchFunctionMode):
    """Names of such calls, in order, but for those that Triton's interpreter itself makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Every call of torch comes by here."""
        name = func.__name__
        if (name in ASKING or _has_mask(name, args)) and not _is_interpreters():
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """How many values a mask takes is known where the mask lies."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index)


def _is_interpreters() -> bool:
    frames = traceback.walk_stack(None)
    return any(str(frame.f_globals.get("__name__")).startswith("triton.") for frame, _ in frames)
