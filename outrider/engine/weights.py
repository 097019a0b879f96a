"""Tensors of a model folder by name, from safetensors alone: one file, or shards with an index.

Never unpickles and never runs code of the folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from outrider.engine.config import FORMATS
from outrider.engine.weight_files import weight_files
from outrider.model_error import ModelError


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of the folder on the device: matrices in dtype, vectors in float32.

    Vectors are norms and biases: small, and used in float32 arithmetic.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict, it has no iterator
                    tensors[name] = _load(path, name, file.get_tensor(name), dtype, device)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    return tensors


def _load(
    path: Path, name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The tensor as it is used; integers would be a quantised format."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(
            f"{path}: {name} is {tensor.dtype}; quantised weights are not supported, only {FORMATS}"
        )
    # A copy: the file is mapped, and a process whose mapped weights change or vanish dies.
    return tensor.to(device, torch.float32 if tensor.dim() == 1 else dtype, copy=True)
