"""Tokens chosen by compiled code: the reference's, for every setting and to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.sampling import TokenChooser
from outrider.params import SamplingParams
from outrider_kernels.choice import Choice
from outrider_kernels.mass import MASS_OF_ONE, masses_of, weights_of
from outrider_kernels.native_build import instruction_sets
from outrider_kernels.native_library import Library
from outrider_kernels.native_sampling import choose
from outrider_kernels.noise import gumbel_array
from tests.support.implementations import library

SHAPES = ("steep", "normal", "flat", "equal", "few")
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(top_k=50),
    "top-k-large": SamplingParams(temperature=1.7, top_k=700),
    "top-p": SamplingParams(temperature=0.7, top_p=0.95),
    "top-p-small": SamplingParams(top_p=0.2),
    "min-p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.02),
}


@pytest.fixture(params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> Library:
    """The compiled functions, for each instruction set in turn."""
    return library(request.param)


def make_row(shape: str, num_ids: int, seed: int) -> torch.Tensor:
    """Logits as models give them, or harder to choose from."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_ids, generator=generator)
    if shape == "steep":
        ranks = 1 + torch.randperm(num_ids, generator=generator)
        return noise - 2 * ranks.log()
    if shape == "few":
        return torch.where(noise > 1.5, noise.round(), -torch.inf)
    return {"normal": 3 * noise, "flat": 0.1 * noise, "equal": torch.zeros(num_ids)}[shape]


def choice_of(rows: torch.Tensor, params: SamplingParams, position: int, **given: object) -> Choice:
    """All of a row's ids, and no drafts, unless told otherwise."""
    asked = {"num_ids": rows.shape[1], "drafts": (), **given}
    return Choice(
        rows,
        position=position,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        **asked,  # type: ignore[arg-type]
    )


def expected(row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The reference's token."""
    return TokenChooser(params, row.numel(), prompt_len=1).choose(row, [0] * position)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_reference(kernels: Library, shape: str, name: str) -> None:
    """Vocabularies of all sizes, settings of all kinds, many seeds: one token."""
    for num_ids in (1, 5, 100, 2000, 5003):
        rows = make_row(shape, num_ids, num_ids)[None]
        if not rows.isfinite().any():
            continue
        for seed in range(12):
            params = replace(PARAMS[name], seed=seed * 0x123456789ABCDEF)
            found = choose(kernels, [choice_of(rows, params, 3 * seed + 1)])
            assert found == [[expected(rows[0], params, 3 * seed + 1)]]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.sampled_from(SHAPES),
    num_ids=st.sampled_from([17, 255, 256, 257, 3000]),
    temperature=st.sampled_from([1e-45, 1e-6, 0.3, 1.0, 1.1, 30.0]),
    top_k=st.sampled_from([0, 1, 2, 15, 200, 299, 5000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 1e-30, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
def test_any_mixture_of_settings(
    kernels: Library,
    shape: str,
    num_ids: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    """Filters one behind the other, at their limits too."""
    rows = make_row(shape, num_ids, 1)[None]
    rows[0, num_ids // 2] = 0.5  # so that there is a token at all
    params = SamplingParams(temperature, top_k, top_p, min_p, seed)
    chooser = TokenChooser(params, num_ids, prompt_len=0)
    kept = chooser.candidates(rows[0], [])
    noisy = kept.scores + gumbel_array(seed, position, kept.ids)
    best = int(kept.ids[noisy == noisy.max()].min())
    assert choose(kernels, [choice_of(rows, params, position)]) == [[best]]


def test_noise_is_equal_to_the_last_bit(kernels: Library) -> None:
    """Two tokens whose scores differ by just what their noise does: the next float decides."""
    rng = np.random.default_rng(0)
    num_flips = 0
    for seed in range(400):
        ids = np.sort(rng.choice(3000, 2, replace=False))
        noise = gumbel_array(seed, 9, ids)
        low, high = (0, 1) if noise[0] < noise[1] else (1, 0)
        row = torch.full((1, 3000), -torch.inf)
        row[0, ids[low]] = 0.0
        score, winners = noise[low] - noise[high], set()
        for target in (-np.inf, np.inf):
            at = score
            for _ in range(3):
                row[0, ids[high]] = float(at)
                params = SamplingParams(seed=seed)
                found = choose(kernels, [choice_of(row, params, 9)])[0][0]
                assert found == expected(row[0], params, 9)
                winners.add(found)
                at = np.nextafter(at, np.float32(target))
        num_flips += len(winners) == 2
    assert num_flips > 100  # so the tests were indeed at the edge


def test_masses_are_equal_to_the_last_bit(kernels: Library) -> None:
    """top_p just at, above and below what the best tokens weigh together."""
    num_ids = 700
    row = make_row("normal", num_ids, 4)
    scores = (row - row.max()).numpy() / np.float32(1.3)
    order = np.lexsort((np.arange(num_ids), -scores))
    sums = np.cumsum(masses_of(weights_of(scores[order])))
    for num_kept in range(1, 200):
        share = sums[num_kept - 1] / sums[-1]
        for top_p in (np.nextafter(share, 0), share, np.nextafter(share, 1)):
            for seed in range(3):
                params = SamplingParams(1.3, top_p=float(top_p), seed=seed)
                found = choose(kernels, [choice_of(row[None], params, 5)])
                assert found == [[expected(row, params, 5)]]


def test_weights_are_equal_to_the_last_bit(kernels: Library) -> None:
    """min_p just at and above a token's weight: it can win in one case, and not in the other."""
    for score in -np.random.default_rng(1).uniform(0, 3, 300).astype(np.float32):
        weight = weights_of(np.array([score]))[0]
        row = torch.tensor([[0.0, float(score)]])
        for min_p in (weight, np.nextafter(weight, np.float32(1))):
            params = SamplingParams(min_p=float(min_p))
            seed = next(
                seed
                for seed in range(10_000)
                if (score + np.diff(gumbel_array(seed, 2, np.arange(2))))[0] > 0
            )
            found = choose(kernels, [choice_of(row, replace(params, seed=seed), 2)])
            assert found == [[int(min_p == weight)]]


def test_weights_are_exp_and_whole_numbers_of_it() -> None:
    """Within 2e-6 of exp, 1 for the best, 0 for what cannot be; masses rounded to nearest."""
    scores = -np.linspace(0, 80, 100_001).astype(np.float32)
    weights = weights_of(scores)
    exact = np.exp(scores.astype(np.float64))
    assert np.abs(weights / exact - 1).max() < 1e-5
    assert np.abs(weights / exact - 1)[scores > -16].max() < 2e-6
    edge = np.array([0.0, -0.0, -90.0, -np.inf], np.float32)
    assert weights_of(edge).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert masses_of(np.array([1.0, 0.5, 2.0**-36, 2.0**-37, 2.0**-38 * 3], np.float32)).tolist() \
        == [MASS_OF_ONE, MASS_OF_ONE // 2, 1, 0, 1]  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", PARAMS)
def test_rows_without_a_finite_best_are_told(kernels: Library, bad: float, name: str) -> None:
    """NaN or +inf anywhere, or nothing but -inf: -1, and no token behind it."""
    for place in (0, 77, 299):
        rows = make_row("normal", 300, 0)[None].repeat(3, 1)
        if bad == float("-inf"):
            rows[1] = bad
        else:
            rows[1, place] = bad
        first = expected(rows[0], PARAMS[name], 4)
        found = choose(kernels, [choice_of(rows, PARAMS[name], 4, drafts=(first, 5))])
        assert found == [[first, -1]]


def test_padding_is_neither_read_nor_chosen(kernels: Library) -> None:
    """Ids from num_ids on may hold anything."""
    rows = torch.zeros(1, 300)
    rows[:, 70:] = torch.nan
    for name in ("greedy", "temperature", "top-k", "top-p"):
        found = choose(kernels, [choice_of(rows, PARAMS[name], 4, num_ids=70)])
        assert found == [[expected(rows[0, :70], PARAMS[name], 4)]]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_step_in_one_call(kernels: Library, num_threads: int) -> None:
    """Sequences of their own settings and rows, each up to the first token that is not a draft."""
    num_ids, first = 30_000, 0
    rows = torch.stack([make_row("normal", num_ids, i) for i in range(24)])
    choices, wanted = [], []
    for i, name in enumerate(PARAMS):
        params = replace(PARAMS[name], seed=i)
        mine = [expected(rows[first + j], params, 10 + j) for j in range(3)]
        drafts, num_right = [mine[0], mine[1]], i % 3
        if num_right < 2:
            drafts[num_right] = (mine[num_right] + 1) % num_ids
        choices.append(choice_of(rows[first : first + 3], params, 10, drafts=drafts))
        wanted.append(mine[: num_right + 1])
        first += 3
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert choose(kernels, choices) == wanted
        assert choose(kernels, []) == []
    finally:
        torch.set_num_threads(before)


def test_rows_that_do_not_fit_are_refused(kernels: Library) -> None:
    """Another dtype, another number of rows, more ids than there are: an error, not memory read."""
    rows, params = torch.zeros(2, 8), SamplingParams()
    for wrong in (
        choice_of(rows.double(), params, 0, drafts=(1,)),
        choice_of(rows, params, 0, drafts=(1, 2)),
        choice_of(rows, params, 0, drafts=(1,), first=1),
        choice_of(rows, params, 0, first=-1),
        choice_of(rows, params, 0, drafts=(1,), num_ids=9),
        choice_of(torch.zeros(8, 2).T, params, 0, drafts=(1,)),
    ):
        with pytest.raises(ValueError, match="rows"):
            choose(kernels, [wrong])
