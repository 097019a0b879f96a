"""Precisions and devices by the names that settings use, and what the device has to offer."""

from __future__ import annotations

import torch

from outrider.engine.memory import free_host_bytes
from outrider.model_error import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_dtype(name: str) -> torch.dtype:
    """A precision of weights, activations and cache; ModelError for any other name."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ModelError(f"dtype must be {' or '.join(DTYPES)}, got {name!r}") from None


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
