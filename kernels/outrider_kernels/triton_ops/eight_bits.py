"""Numbers in 8 bits inside kernels: the same on every chip, and in the interpreter.

e4m3 is handled by its bits, because chips before sm_89 have no instruction for it and because the
bits of an e4m3, moved, are those of the float16 that is 256 times smaller.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_SHIFT: tl.constexpr = tl.constexpr(256.0)
"""What `e4m3_to_fp16` leaves to its caller as a factor."""


@triton.jit
def e4m3_to_fp16(bits):
    """uint8 bits of finite e4m3 numbers, as float16 that are E4M3_SHIFT times smaller, exactly."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def int8_to_fp16(x):
    """float16 of int8 numbers, without the chip's slow conversion: 1024 + u has u as its bits."""
    biased = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)
    return (biased | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def fp32_to_e4m3(x):
    """uint8 bits of e4m3, rounded to nearest even; x is finite and at most 448 in size."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    bits = size.to(tl.uint32, bitcast=True)
    # 20 of the fraction's bits go, and the exponent's bias of 127 becomes 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are 2**-9, as are those of float32 between 2**14 and 2**15.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0.015625, small, normal)).to(tl.uint8)


@triton.jit
def round_to_int8(x):
    """int8 of float32 numbers, rounded to nearest even; x is at most 127 in size."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)
