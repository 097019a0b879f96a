"""From tensors to a launch: types, alignment, copies, and the one call that starts a kernel."""

from __future__ import annotations

from typing import Any

import torch

from outrider_kernels.triton_ops.variant import Variant

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "u8",  # kernels see the bits
    torch.int32: "i32",
    torch.int64: "i64",
}
ALIGNMENT = 16  # bytes


def type_name(tensor: torch.Tensor, *allowed: str) -> str:
    """Triton's name for the tensor's type; ValueError unless it is one of those allowed."""
    name = TYPES.get(tensor.dtype, str(tensor.dtype))
    if name not in allowed:
        raise ValueError(f"the kernel takes {' or '.join(allowed)}, not {name}")
    return name


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not begin at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The CPU's tensor on a device; the host waits for nothing that runs there."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def launch(kernel: Any, grid: tuple[int, ...], variant: Variant, *args: Any) -> None:
    """Run a kernel in a listed form; args are the run-time arguments in order."""
    if 0 in grid:
        return
    kernel[grid](*args, **dict(variant.constants), **variant.options)
