"""Which precisions a model has where settings leave them open. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

AUTO = "auto"
EITHER = "int8+int4"
"""Each matrix in int4 where that gives every weight back, else in int8; as
outrider_kernels.quantise has it."""


def choose_precision(dtype: str, device: str) -> str:
    """What "auto" means on a device, "cpu" or "cuda:N"; any other name as it is.

    A CPU waits for memory, so int8, whose quality holds (docs/LOG.md), and int4 where it loses
    nothing, as with what comes from a file in 4 bits; every model that runs in bfloat16 runs so. On
    a GPU nobody has measured what they gain.
    """
    if dtype != AUTO:
        return dtype
    return EITHER if device == "cpu" else "bfloat16"


def kept_precision(types: Sequence[str]) -> str:
    """What EITHER became, of each matrix "int8" or "int4": that, or EITHER where there are both."""
    logger.info("%d of %d matrices lose nothing in 4 bits", types.count("int4"), len(types))
    return EITHER if len(set(types)) > 1 else types[0]


def choose_kv_precision(kv_dtype: str, precision: str) -> str:
    """What keys and values are kept in: "auto" is as the activations of that precision are."""
    if kv_dtype != AUTO:
        return kv_dtype
    return "float32" if precision == "float32" else "bfloat16"
