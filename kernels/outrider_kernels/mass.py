"""What tokens weigh against each other: exp of their scores, in sums that no order changes.

A filter that keeps "the best tokens that make up 95 %" compares sums of many small numbers, and
float sums depend on their order. Here every weight is a whole number of a small unit, so sums are
exact; and exp is a fixed sequence of single float32 operations, as the logarithm of `noise` is. An
implementation in another language that does these gives the same tokens, always.

    x = score * log2(e), at least -126      n = x rounded to nearest even      f = x - n
    weight = P(f) * 2**n, and 0 where x < -125                  P(f) near 2**f, exactly 1 at 0
    mass = weight * 2**36, rounded to nearest even
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASS_OF_ONE = 2**36
"""The mass of weight 1: of the best token. All of a vocabulary of 2**26 fits into an int64."""

_LOG2_E = np.float32(1.44269504)
_WHOLE = np.float32(1.5 * 2**23)  # a number of this size holds no fraction: adding it rounds
_LEAST = np.float32(-126)
_ZERO_BELOW = np.float32(-125)
_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        1.326472731307149e-3,
        9.671512991189957e-3,
        5.550733581185341e-2,
        2.4022242426872253e-1,
        6.931470036506653e-1,
        1.0,
    )
)


def weights_of(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp(score) for scores of at most 0, within 2e-6 of itself; exactly 1 for 0."""
    x = np.maximum(scores * _LOG2_E, _LEAST)
    shifted = x + _WHOLE
    f = x - (shifted - _WHOLE)
    y = f * _COEFFICIENTS[0]
    y += _COEFFICIENTS[1]
    for coefficient in _COEFFICIENTS[2:]:
        y *= f
        y += coefficient
    y *= ((shifted.view(np.int32) - (0x4B400000 - 127)) << 23).view(np.float32)
    weights: NDArray[np.float32] = np.where(x < _ZERO_BELOW, np.float32(0), y)
    return weights


def masses_of(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Weights of at most 1 as whole numbers; MASS_OF_ONE is 1."""
    return np.rint(weights.astype(np.float64) * MASS_OF_ONE).astype(np.int64)
