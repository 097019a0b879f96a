"""Which precision a model runs in where the setting leaves it open. Needs no torch."""

from __future__ import annotations

AUTO = "auto"


def choose_precision(dtype: str, device: str) -> str:
    """What "auto" means on a device, "cpu" or "cuda:N"; any other name as it is.

    A CPU waits for memory, so int8, whose quality holds (docs/LOG.md); every model that runs in
    bfloat16 runs in it. A GPU has no int8 products of ours.
    """
    if dtype != AUTO:
        return dtype
    return "int8" if device == "cpu" else "bfloat16"
