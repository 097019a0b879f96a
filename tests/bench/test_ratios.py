"""The interval of a ratio, against values worked out by hand."""

import math

import pytest

from bench.ratios import ratio_of


def test_mean_and_interval() -> None:
    """Logs of 1.0, 1.1 and 1.21 are 0, a and 2a: mean a, deviation a, t = 4.303."""
    ratio = ratio_of([10, 11, 24.2], [10, 10, 20])
    half = 4.303 * math.log(1.1) / math.sqrt(3)
    assert ratio.mean == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1 * math.exp(-half))
    assert ratio.high == pytest.approx(1.1 * math.exp(half))
    assert ratio.num_pairs == 3


def test_one_pair_has_no_interval() -> None:
    """It says so, rather than one of width zero."""
    with pytest.raises(ValueError, match="two pairs"):
        ratio_of([1.0], [1.0])


def test_no_width_where_all_are_equal() -> None:
    """Three equal ratios."""
    ratio = ratio_of([2, 4, 6], [1, 2, 3])
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((2, 2, 2))
