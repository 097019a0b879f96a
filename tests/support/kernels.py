"""What computes the models of tests.

`pytest --kernels triton …` chooses Triton's kernels in its interpreter (see tests/conftest.py): for
every model that leaves it open, in this process. They are slow, and only for some sizes of heads.
"""

from __future__ import annotations

import os

VARIABLE = "TEST_KERNELS"
"""Where the option is left, for constants of modules."""


def are_interpreted() -> bool:
    """Whether this process computes with Triton's interpreter."""
    return os.environ.get(VARIABLE) == "triton"


def each_kernels() -> tuple[str, ...]:
    """What tests of every implementation name: all that this process can have."""
    return ("triton",) if are_interpreted() else ("auto", "torch")


def fitting_head_dim(wanted: int) -> int:
    """The next larger size of heads that the kernels have in every dtype."""
    from outrider_kernels.triton_ops.configs import HEAD_DIMS

    return next(size for size in HEAD_DIMS if size >= max(wanted, 64))


def prefer_triton() -> None:
    """Make "auto" mean Triton's kernels, in this process."""
    from outrider.engine import model
    from outrider_kernels import ops
    from tests.kernels.triton import interpreter

    interpreter.install()

    def select_ops(device: object, kernels: str = "auto", **more: object) -> ops.Ops:
        wanted = "triton" if kernels == "auto" else kernels
        return ops.select_ops(device, wanted, **more)  # type: ignore[arg-type]

    model.select_ops = select_ops  # type: ignore[assignment]
