"""Weights that 4 bits hold exactly: every group of 32 inputs has 16 levels, as a Q4 file gives."""

from __future__ import annotations

from pathlib import Path

import torch


def sixteen_levels(num_out: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] from -8 to 7 steps of 1/32; each group has both ends, if it has two inputs."""
    generator = torch.Generator().manual_seed(num_in * 1000 + num_out)
    weight = torch.randint(-8, 8, (num_out, num_in), generator=generator)
    weight[:, ::32] = -8
    weight[:, 1::32] = 7
    return (weight / 32).to(dtype)


def give_sixteen_levels(folder: Path, *endings: str) -> Path:
    """Rewrite the folder's matrices whose names so end, and return it; "" is all of them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.removesuffix(".weight").endswith(endings):
            tensors[name] = sixteen_levels(*tensor.shape, tensor.dtype)
    save_file(tensors, path, {"format": "pt"})
    return folder
