"""Noise inside kernels: that of outrider_kernels/noise.py, bit for bit.

Everything after Philox's words is single float32 operations in that file's order. Kernels that use
it are compiled without fused multiply-add, which would round a product and a sum only once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider_kernels.triton_ops.configs_sampling import GUMBEL, VOCAB_BLOCK
from outrider_kernels.triton_ops.launch import launch

MAX_GUMBEL: tl.constexpr = tl.constexpr(22.88)
"""As there: above every noise."""


@triton.jit
def words_of(seed, first, position, stream, BLOCK: tl.constexpr):
    """uint32 words of ids first to first + BLOCK - 1, both multiples of 4; seed is an int64."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + position, zero + stream, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def log_of_split(f, exponent):
    """log((1 + f) * 2**exponent)."""
    square = f * f
    y = f * 7.0376836292e-2 + -1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f + -1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f + -1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f + -2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f
    y = y * square
    y = y + exponent * -2.12194440e-4
    y = y - square * 0.5
    y = y + f
    return y + exponent * 0.693359375


@triton.jit
def fixed_log(x):
    """log(x) for normal x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    is_small = mantissa < 0.70710677
    mantissa = tl.where(is_small, mantissa + mantissa, mantissa)
    exponent = tl.where(is_small, exponent - 1.0, exponent)
    return log_of_split(mantissa - 1.0, exponent)


@triton.jit
def uniform_of(words):
    """w in (0, 1), strictly inside."""
    w = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(w, 0.99999994039535522)


@triton.jit
def gumbel_of(words):
    """g = -log(-log(1 - w)); falls with the word."""
    w = uniform_of(words)
    direct = -log_of_split(-w, 0.0)
    exponential = tl.where(w < 0.29289323, direct, -fixed_log(1.0 - w))
    return -fixed_log(exponential)


@triton.jit(do_not_specialize=["position", "stream", "num_ids"])
def gumbel_kernel(seed, out, position, stream, num_ids, BLOCK: tl.constexpr):
    """Program: a block of ids."""
    first = tl.program_id(0) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    noise = gumbel_of(words_of(tl.load(seed), first, position, stream, BLOCK))
    tl.store(out + ids, noise, mask=ids < num_ids)


def gumbel(seed: int, num_ids: int, position: int, stream: int, device: str) -> torch.Tensor:
    """Gumbel noise of ids 0 to num_ids - 1, float32; seed below 2**64."""
    key = torch.tensor([seed - (seed >> 63 << 64)], dtype=torch.int64, device=device)
    out = torch.empty(num_ids, dtype=torch.float32, device=device)
    grid = (triton.cdiv(num_ids, VOCAB_BLOCK),)
    launch(gumbel_kernel, grid, GUMBEL, key, out, position, stream, num_ids)
    return out
