"""Noise that is the same everywhere: Philox4x32-10 words and Gumbel noise made from them.

A word is a pure function of (seed, position, stream, id), so target and draft, any batch and any
device draw the same one. The floats are equal too: everything after the words is a fixed sequence
of single float32 operations (multiply, add, negate), each rounded on its own, with no library
logarithm and no fused multiply-add. An implementation in another language must do these operations
in this order; the tests hold golden bits to compare with.

    counter = (id div 4, position, stream, 0), key = (low, high half of the seed), word id mod 4
    u = float32(word) + 0.5                       float32(word) rounds to nearest even, so does +
    w = min(u * 2**-32, 1 - 2**-24)               in (0, 1)
    E = -log(1 - w)      g = -log(E)              E is exponential, g is Gumbel

It computes on numpy arrays: one thread, no fusion, little overhead for few ids. Knows nothing of
logits or of what the noise is for.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MAX_GUMBEL = 22.88
"""Above every Gumbel value: the largest is -log(2**-33) = 22.874."""

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)

# log(1 + f) on sqrt(1/2) <= 1 + f < sqrt(2): f - f*f/2 + f*f*f*P(f), coefficients of Cephes' logf.
_LOG_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
_LN2_LOW = np.float32(-2.12194440e-4)
_LN2_HIGH = np.float32(0.693359375)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_SQRT_HALF = np.float32(0.70710677)
_DIRECT_BELOW = np.float32(0.29289323)  # 1 - sqrt(1/2): up to here log(1 - w) needs no exponent
_LARGEST_W = np.float32(1 - 2**-24)


class Stream(IntEnum):
    """What a draw is for; draws of different streams are independent."""

    EXACT = 0
    """The target's own choice, shared with a drafter that guesses it."""
    DRAFT = 1
    """A drafter's own choice in rejection mode."""
    ACCEPT = 2
    """The coin of rejection mode; id 0."""
    RESIDUAL = 3
    """The choice after a rejection."""
    FORK = 4
    """Seeds of the further choices of one request."""


def philox_blocks(
    seed: int, blocks: NDArray[np.uint64], position: int, stream: int
) -> NDArray[np.uint32]:
    """Philox4x32-10 of counter (block, position, stream, 0); [num_blocks, 4]."""
    num_blocks = blocks.shape[0]
    # Row 0 holds counter words 0 and row 1 words 2; `others` holds words 1 and 3.
    multiplied = np.empty((2, num_blocks), dtype=np.uint64)
    multiplied[0] = blocks
    multiplied[1] = stream
    others = np.zeros((2, num_blocks), dtype=np.uint64)
    others[0] = position
    for key in _round_keys(seed):
        product = (multiplied * _MULTIPLIERS)[::-1]
        multiplied = product >> _SHIFT_32
        multiplied ^= others
        multiplied ^= key
        others = product & _LOW_32
    words = np.empty((num_blocks, 4), dtype=np.uint32)
    words[:, 0], words[:, 2] = multiplied
    words[:, 1], words[:, 3] = others
    return words


def philox_words(
    seed: int, ids: NDArray[np.int64], position: int, stream: int
) -> NDArray[np.uint32]:
    """The word of each id, [num_ids]."""
    blocks = philox_blocks(seed, (ids >> 2).astype(np.uint64), position, stream)
    words: NDArray[np.uint32] = blocks[np.arange(ids.shape[0]), ids & 3]
    return words


def all_words(seed: int, num_ids: int, position: int, stream: int) -> NDArray[np.uint32]:
    """The words of ids 0 to num_ids - 1, at a quarter of the work for each."""
    blocks = np.arange(-(-num_ids // 4), dtype=np.uint64)
    return philox_blocks(seed, blocks, position, stream).reshape(-1)[:num_ids]


def uniform_from_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """w in (0, 1), strictly inside; rises with the word."""
    w = words.astype(np.float32)
    w += _HALF
    w *= np.float32(2.0**-32)
    return np.minimum(w, _LARGEST_W)


def gumbel_from_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Gumbel noise g = -log(-log(1 - w)); falls with the word."""
    w = uniform_from_words(words)
    direct = w < _DIRECT_BELOW
    rest_f, rest_exponent = _split(_ONE - w)
    f = np.where(direct, -w, rest_f)
    exponent = np.where(direct, np.float32(0), rest_exponent)
    exponential = -_log_of_split(f, exponent)
    noise: NDArray[np.float32] = -_log_of_split(*_split(exponential))
    return noise


def gumbel_array(
    seed: int, position: int, ids: NDArray[np.int64], stream: int = Stream.EXACT
) -> NDArray[np.float32]:
    """Gumbel noise of each id at a position, [num_ids]."""
    return gumbel_from_words(philox_words(seed, ids, position, stream))


def coin(seed: int, position: int) -> float:
    """w of id 0 of ACCEPT: rejection mode's uniform number in (0, 1) for a position."""
    words = philox_words(seed, np.zeros(1, dtype=np.int64), position, Stream.ACCEPT)
    return float(uniform_from_words(words)[0])


def child_seed(seed: int, choice: int) -> int:
    """The seed of choice i of n; choice 0 has the seed itself."""
    if choice == 0:
        return seed
    words = philox_blocks(seed, np.array([choice], dtype=np.uint64), 0, Stream.FORK)[0]
    return int(words[0]) | int(words[1]) << 32


def _round_keys(seed: int) -> NDArray[np.uint64]:
    """The key of each round, [10, 2, 1]."""
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], dtype=np.uint64)
    return (key + _ROUNDS * _KEY_STEPS) & _LOW_32


def _split(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Normal x > 0 as (1 + f) * 2**exponent, sqrt(1/2) <= 1 + f < sqrt(2), by its bits alone."""
    bits = x.view(np.int32)
    exponent = ((bits >> 23) - 126).astype(np.float32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)  # in [1/2, 1)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa + mantissa, mantissa)
    return mantissa - _ONE, exponent - small.astype(np.float32)


def _log_of_split(f: NDArray[np.float32], exponent: NDArray[np.float32]) -> NDArray[np.float32]:
    """log((1 + f) * 2**exponent)."""
    square = f * f
    y = f * _LOG_COEFFICIENTS[0]
    y += _LOG_COEFFICIENTS[1]
    for coefficient in _LOG_COEFFICIENTS[2:]:
        y *= f
        y += coefficient
    y *= f
    y *= square
    y += exponent * _LN2_LOW
    y -= square * _HALF
    y += f
    y += exponent * _LN2_HIGH
    return y
