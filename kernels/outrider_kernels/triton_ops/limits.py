"""Which devices and which models the kernels are for, and why not for another one. Needs no triton.

Every reason ends a sentence such as "Triton's kernels cannot be used: ...".
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from outrider_kernels.model_shape import ModelShape
from outrider_kernels.triton_ops.configs import ATTENTION, NORM_BLOCKS, UNALIGNED_BLOCK
from outrider_kernels.triton_ops.configs_sampling import MAX_VOCABULARY
from outrider_kernels.triton_ops.launch import TYPES
from outrider_kernels.triton_ops.work import MAX_GROUP

CHIPS = ((8, 0), (9, 0))
"""Compute capabilities that tests compile every form for."""


def why_not_on(device: torch.device) -> str | None:
    """Why nothing can run there; None: it can, on a CPU slowly and for tests alone."""
    installed = find_spec("triton") is not None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "no CUDA device is found"
        return None if installed else "triton is not installed (pip install 'outrider[gpu]')"
    if installed:
        from triton import knobs

        if knobs.runtime.interpret:
            return None
    return (
        "they need a GPU, such as device cuda:0; on a CPU Triton's interpreter runs them for tests "
        "(triton installed, TRITON_INTERPRET=1)"
    )


def why_not_tried_on(device: torch.device) -> str | None:
    """Why nobody knows whether a CUDA device, as torch calls it, has room for every form."""
    if torch.version.hip is not None:
        return "their forms are compiled in tests for NVIDIA's chips"
    found = torch.cuda.get_device_capability(device)
    if found in CHIPS:
        return None
    names = " and ".join(f"{major}.{minor}" for major, minor in CHIPS)
    return (
        f"their forms are compiled in tests for compute capability {names}, this device has "
        f"{found[0]}.{found[1]}"
    )


def why_not_for(shape: ModelShape | None) -> str | None:
    """Why a model's steps are in no table."""
    if shape is None:
        return "nothing is known of the model"
    tile, group = largest_tile(shape), shape.num_heads // shape.kv_heads
    if not tile:
        name = str(shape.dtype).removeprefix("torch.")
        cache = "" if shape.kv_dtype == shape.dtype else " with a cache in 8 bits"
        return f"there are no forms for heads of {shape.head_dim} values in {name}{cache}"
    if group > min(tile, MAX_GROUP):
        return f"{group} heads share a KV head, at most {min(tile, MAX_GROUP)} may"
    widest = UNALIGNED_BLOCK if shape.hidden_size % 8 else NORM_BLOCKS[-1]
    if shape.hidden_size > widest:
        return f"rows have {shape.hidden_size} values, at most {widest} are supported"
    if shape.vocab_size > MAX_VOCABULARY:
        return f"the vocabulary has {shape.vocab_size} ids, at most {MAX_VOCABULARY} are supported"
    return None


def largest_tile(shape: ModelShape) -> int:
    """Rows of attention's largest tile for a model, 0 where there is none."""
    dtype, cache = TYPES.get(shape.dtype), TYPES.get(shape.kv_dtype)
    wanted = (dtype, cache, shape.head_dim)
    return max((key[3] for key in ATTENTION if key[:3] == wanted), default=0)
