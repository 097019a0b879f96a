"""The noise: known answers, golden bits, and the distribution that it should have."""

from __future__ import annotations

import numpy as np
import pytest

from outrider_kernels import noise
from outrider_kernels.version import NOISE_VERSION

GOLDEN_OF_WORDS = [
    "41b6fda9",
    "41ae33b3",
    "414c2793",
    "40b16211",
    "3f87a2f1",
    "3f87a2f1",
    "3ebba795",
    "bea73c9b",
    "c033f049",
    "c033f049",
]
GOLDEN_OF_DRAWS = ["3f025a5e", "3fc6b0f6", "3fe8b905", "bf36e1da", "bfa2ae33", "3e8392b6"]


def philox_plain(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of any counter in plain integers, as its paper writes it."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k0,
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k1,
            first & 0xFFFFFFFF,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_plain_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """The plain form used below is Philox4x32-10."""
    assert philox_plain(counter, key) == words


def test_words_equal_the_plain_form() -> None:
    """Every id's word is word id mod 4 of counter (id div 4, position, stream, 0)."""
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.arange(9), rng.integers(0, 200_000, 20)]).astype(np.int64)
    for seed, position, stream in [(0, 0, 0), (2**64 - 1, 8191, 3), (0x0123456789ABCDEF, 77, 1)]:
        key = (seed & 0xFFFFFFFF, seed >> 32)
        expected = [philox_plain((i // 4, position, stream, 0), key)[i % 4] for i in ids.tolist()]
        assert noise.philox_words(seed, ids, position, stream).tolist() == expected
    everything = noise.all_words(5, 103, 9, 2)
    assert np.array_equal(everything, noise.philox_words(5, np.arange(103), 9, 2))


def test_gumbel_is_accurate_and_bounded_over_all_words() -> None:
    """Within float32's precision of the exact value; finite and below MAX_GUMBEL at both ends."""
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, 2, 2**23, 2**24, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    near = (0.29289323 * 2**32 + np.arange(-300, 300)).astype(np.uint32)
    words = np.concatenate([edges, near, rng.integers(0, 2**32, 100_000, dtype=np.uint32)])
    g = noise.gumbel_from_words(words)
    w = noise.uniform_from_words(words).astype(np.float64)
    exact = -np.log(-np.log1p(-w))
    assert g.dtype == np.float32
    assert np.abs(g - exact).max() < 2e-6
    assert np.isfinite(g).all()
    assert g.max() < noise.MAX_GUMBEL
    assert ((w > 0) & (w < 1)).all()


def test_gumbel_never_rises_with_the_word() -> None:
    """A larger word never gives more noise, up to rounding: what skipping of losers relies on."""
    words = np.sort(np.random.default_rng(2).integers(0, 2**32, 50_000, dtype=np.uint32))
    assert np.diff(noise.gumbel_from_words(words).astype(np.float64)).max() < 1e-6


def test_golden_bits() -> None:
    """The exact float bits: any other implementation of the noise must give these."""
    words = np.array(
        [0, 1, 12345, 2**24 + 1, 1257966796, 1257966797, 2**31, 3 << 30, 2**32 - 300, 2**32 - 1],
        dtype=np.uint32,
    )
    bits = noise.gumbel_from_words(words).view(np.uint32).tolist()
    assert [f"{b:08x}" for b in bits] == GOLDEN_OF_WORDS
    drawn = noise.gumbel_array(1234567890123456789, 17, np.array([0, 1, 2, 3, 4, 49151]))
    assert [f"{b:08x}" for b in drawn.view(np.uint32).tolist()] == GOLDEN_OF_DRAWS
    assert NOISE_VERSION == 1


def test_a_value_depends_on_its_own_counter_only() -> None:
    """The same id gives the same bits alone, in company and in any order."""
    ids = np.random.default_rng(3).permutation(3000)
    together = noise.gumbel_array(9, 4, ids)
    for index in (0, 17, 2999):
        alone = noise.gumbel_array(9, 4, ids[index : index + 1])
        assert alone[0] == together[index]


def test_streams_positions_and_seeds_differ() -> None:
    """No two of them share their draws."""
    ids = np.arange(64)
    draws = {
        noise.philox_words(seed, ids, position, stream).tobytes()
        for seed in (0, 1, 1 << 32)
        for position in (0, 1)
        for stream in noise.Stream
    }
    assert len(draws) == 3 * 2 * len(noise.Stream)


def test_child_seeds() -> None:
    """Choice 0 keeps the seed; the others are words 0 and 1 of the FORK stream, low half first."""
    seed = 0xFEDCBA9876543210
    assert noise.child_seed(seed, 0) == seed
    words = philox_plain((3, 0, 4, 0), (0x76543210, 0xFEDCBA98))
    assert noise.child_seed(seed, 3) == words[0] + (words[1] << 32)
    assert len({noise.child_seed(seed, i) for i in range(8)}) == 8


def test_gumbel_has_the_right_moments() -> None:
    """Mean 0.5772 and variance pi**2 / 6, over many draws."""
    g = noise.gumbel_from_words(noise.all_words(42, 400_000, 3, 0)).astype(np.float64)
    assert abs(g.mean() - 0.577216) < 0.01
    assert abs(g.var() - np.pi**2 / 6) < 0.02
