"""The small operations between the matrix products.

Each is a chain of single rounded operations (and `exp`, whose result here depends on its argument
alone). Fused forms are avoided on purpose: torch's `silu` and `sigmoid` give other bits in the last
elements of a vector than in its middle, so a row would feel where it stands.

All arithmetic is in float32; a narrower input is widened first and the result rounded once.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension; x [rows, ..., width].

    weight is float32.
    """
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide / mean_square.add_(eps).sqrt_()).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to the residual, in place and rounded; the sum's norm. Both [rows, width]."""
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width], the gate first; [rows, width]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's halves against each other by the angles of its position.

    x [rows, heads, head_dim]; cos and signed_sin, float32 [rows, 1, head_dim], hold the angles of
    the half dimensions twice, with the first half of the sines negated.
    """
    wide, half = x.float(), x.shape[-1] // 2
    return (wide * cos).add_(wide.roll(half, -1).mul_(signed_sin)).to(x.dtype)
