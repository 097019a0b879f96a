"""What tokens weigh, inside kernels: weights and masses of outrider_kernels/mass.py, bit for bit.

Masses are whole numbers, so their sums are the same in any order. Without fused multiply-add, as
noise.py here.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASS_OF_ONE: tl.constexpr = tl.constexpr(68719476736.0)  # 2**36


@triton.jit
def weights_of(scores):
    """exp(score) for scores of at most 0; exactly 1 for 0, and 0 far below."""
    x = tl.maximum(scores * 1.44269504, -126.0)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    y = f * 1.326472731307149e-3 + 9.671512991189957e-3
    y = y * f + 5.550733581185341e-2
    y = y * f + 2.4022242426872253e-1
    y = y * f + 6.931470036506653e-1
    y = y * f + 1.0
    power = (shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23
    return tl.where(x < -125.0, 0.0, y * power.to(tl.float32, bitcast=True))


@triton.jit
def masses_of(weights):
    """int64 of weights of at most 1, rounded to nearest even."""
    scaled = weights * MASS_OF_ONE
    # A float32 from 2**23 on holds no fraction: adding it rounds, and larger ones are whole.
    whole = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled)
    return whole.to(tl.int64)
