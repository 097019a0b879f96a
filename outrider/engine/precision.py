"""Which precisions a model has where settings leave them open. Needs no torch."""

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


def choose_kv_precision(kv_dtype: str, precision: str) -> str:
    """What keys and values are kept in: "auto" is as the activations of that precision are."""
    if kv_dtype != AUTO:
        return kv_dtype
    return "float32" if precision == "float32" else "bfloat16"
