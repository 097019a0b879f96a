"""Precisions and devices by the names that settings use, and what the device has to offer."""

from __future__ import annotations

import torch

from outrider.engine.memory import free_host_bytes
from outrider.engine.precision import AUTO, EITHER
from outrider.model_error import ModelError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""Of activations. In int8 only matrices are: weights, and the rows of each product. In int4 weights
are, but for the tables, which are int8 like the rows of each product; with Triton's kernels the
rows of int4 stay bfloat16."""

KV_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
"""Of keys and values in the cache that are rounded."""


def parse_dtype(name: str) -> torch.dtype:
    """Of activations in that precision or EITHER; ModelError for any other name."""
    try:
        return DTYPES["int8" if name == EITHER else name]
    except KeyError:
        *others, last = DTYPES
        names = f"{', '.join(others)} or {last}"
        raise ModelError(f"dtype must be {names}, got {name!r}") from None


def rounding_of(name: str) -> str | None:
    """How `select_ops` is to round weights for one of DTYPES, or EITHER."""
    return name if name in ("int8", "int4", EITHER) else None


def parse_kv_dtype(name: str, activations: torch.dtype) -> torch.dtype:
    """Of keys and values in the cache, "auto" as activations are; ModelError for any other name."""
    if name != AUTO and name not in KV_DTYPES:
        raise ModelError(f"kv_dtype must be auto, int8 or e4m3, got {name!r}")
    return KV_DTYPES.get(name, activations)


def parse_device(name: str) -> torch.device:
    """ "cpu", "cuda" or "cuda:N"; ModelError, with the reason, for one that cannot be used."""
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (index or "0").isdecimal() or name.endswith(":")):
        raise ModelError(f"device must be cpu or cuda:N, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = (
            "this torch was built without CUDA; install a build that has it"
            if torch.version.cuda is None
            else "no CUDA device or driver is found; see nvidia-smi"
        )
        raise ModelError(f"device {name} cannot be used: {why}, or use --device cpu")
    number, found = int(index or 0), torch.cuda.device_count()
    if number >= found:
        raise ModelError(f"device {name} cannot be used: there are {found}, counted from cuda:0")
    return torch.device("cuda", number)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a cache could still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()
