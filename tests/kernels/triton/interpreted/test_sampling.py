"""Tokens from logits: those of the engine's numpy, for every setting and to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.engine.sampling import BadLogits, TokenChooser
from outrider.params import SamplingParams
from outrider_kernels.choice import RowEdits
from outrider_kernels.mass import masses_of, weights_of
from outrider_kernels.noise import Stream, gumbel_array
from outrider_kernels.triton_ops import edits, noise, sampling
from outrider_kernels.triton_ops.settings import RowSettings, settings_table

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
POSITION = 9


def make_row(shape: str, num_ids: int, seed: int) -> torch.Tensor:
    """Logits as models give them, or harder to choose from; the middle one is 0.5."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_ids, generator=generator)
    if shape == "steep":
        values -= 2 * (1 + torch.randperm(num_ids, generator=generator)).log()
    elif shape == "few":
        values = torch.where(values > 1.5, values.round(), -torch.inf)
    else:
        values *= {"normal": 3.0, "equal": 0.0}[shape]
    values[num_ids // 2] = 0.5
    return values


def settings_of(
    params: SamplingParams, position: int, num_ids: int, stream: int = Stream.EXACT
) -> RowSettings:
    """The same for the kernels."""
    filters = (params.seed, params.temperature, params.top_k, params.top_p, params.min_p)
    return RowSettings(position, num_ids, *filters, stream)


def choose(rows: torch.Tensor, params: Sequence[SamplingParams], num_ids: int = 0) -> list[int]:
    """By the kernels, all at POSITION."""
    num_ids = num_ids or rows.shape[1]
    return sampling.choose(
        rows, settings_table([settings_of(p, POSITION, num_ids) for p in params])
    ).tolist()


def expected(row: torch.Tensor, params: SamplingParams) -> int:
    """The reference's token."""
    return TokenChooser(params, row.numel(), prompt_len=1).choose(row, [0] * POSITION)


@pytest.mark.parametrize("seed", [0, 0x123456789ABCDEF, 2**63, 2**64 - 1])
def test_noise_is_equal_to_the_last_bit(seed: int) -> None:
    """Any seed, every stream, positions far away."""
    for stream in Stream:
        position = 2**20 + stream
        got = noise.gumbel(seed, 2500, position, stream, "cpu").numpy()
        assert np.array_equal(got, gumbel_array(seed, position, np.arange(2500), stream))


@pytest.mark.parametrize("shape", ["steep", "normal", "few", "equal"])
@pytest.mark.parametrize("num_ids", [1, 5, 1000, 2051])
def test_tokens_are_those_of_the_reference(num_ids: int, shape: str) -> None:
    """One block and several, whole and cut ones, settings of all kinds in one batch."""
    rows = torch.stack([make_row(shape, num_ids, i) for i in range(len(PARAMS))])
    params = [replace(p, seed=i * 0x123456789ABCDEF) for i, p in enumerate(PARAMS.values())]
    assert choose(rows, params) == [expected(*pair) for pair in zip(rows, params, strict=True)]


def test_tokens_of_a_large_vocabulary() -> None:
    """As many blocks as SmolLM2's rows have."""
    rows = torch.stack([make_row("steep", 49152, i) for i in range(2)])
    params = [replace(PARAMS["all"], seed=4), replace(PARAMS["temperature"], seed=5)]
    assert choose(rows, params) == [expected(*pair) for pair in zip(rows, params, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_of_a_large_vocabulary_at_length(name: str) -> None:
    """Each setting, on rows that are hard to cut."""
    rows = torch.stack([make_row(shape, 49152, 3) for shape in ("steep", "normal", "equal")])
    params = [replace(PARAMS[name], seed=seed) for seed in range(3)]
    assert choose(rows, params) == [expected(*pair) for pair in zip(rows, params, strict=True)]


@pytest.mark.slow
def test_any_mixture_of_settings() -> None:
    """Filters one behind the other, at their limits too."""
    rng = np.random.default_rng(0)
    for num_ids in (17, 300, 2500):
        params = [
            SamplingParams(
                float(rng.choice([1e-45, 1e-6, 0.3, 1.0, 30.0])),
                int(rng.choice([0, 1, 2, 15, 299, 5000])),
                float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.9999999, 1.0])),
                float(rng.choice([0.0, 1e-30, 0.01, 0.5, 1.0])),
                int(rng.integers(0, 2**63)),
            )
            for _ in range(60)
        ]
        shapes = rng.choice(["steep", "normal", "few", "equal"], len(params))
        rows = torch.stack([make_row(shape, num_ids, i) for i, shape in enumerate(shapes)])
        assert choose(rows, params) == [expected(*pair) for pair in zip(rows, params, strict=True)]


def test_top_p_at_its_edges() -> None:
    """top_p just at, above and below what the best tokens weigh together."""
    num_ids = 300
    row = make_row("normal", num_ids, 4)
    scores = (row - row.max()).numpy() / np.float32(1.3)
    order = np.lexsort((np.arange(num_ids), -scores))
    sums = np.cumsum(masses_of(weights_of(scores[order])))
    params = []
    for num_kept in (1, 2, 7, 30):
        share = sums[num_kept - 1] / sums[-1]
        edges = (np.nextafter(share, 0), share, np.nextafter(share, 1))
        params += [SamplingParams(1.3, top_p=float(edge), seed=num_kept) for edge in edges]
    rows = row.repeat(len(params), 1)
    assert choose(rows, params) == [expected(row, p) for p in params]


def test_ties_go_to_the_lowest_id() -> None:
    """In a row, across blocks, and where a filter must leave some of the equal ones out."""
    rows = torch.full((3, 4500), -1.0)
    rows[:, [4400, 2100, 700, 30]] = 2.0
    greedy, two = PARAMS["greedy"], SamplingParams(top_k=2, temperature=0.5)
    params = [greedy, *(replace(two, seed=seed) for seed in (1, 2))]
    got = choose(rows, params)
    assert got[0] == 30
    assert set(got[1:]) <= {30, 700}
    assert got == [expected(*pair) for pair in zip(rows, params, strict=True)]


def test_rows_without_a_finite_best_are_told() -> None:
    """NaN or +inf anywhere, or nothing but -inf: -1 for that row alone."""
    for name in ("greedy", "temperature", "all"):
        rows = torch.stack([make_row("normal", 2100, i) for i in range(5)])
        rows[1, 2099], rows[2, 5], rows[3] = torch.nan, torch.inf, -torch.inf
        got = choose(rows, [PARAMS[name]] * 5)
        assert got[1:4] == [-1, -1, -1]
        for i in (0, 4):
            assert got[i] == expected(rows[i], PARAMS[name])
        for row in rows[1:4]:
            with pytest.raises(BadLogits):
                expected(row, PARAMS[name])


def test_padding_is_neither_read_nor_chosen() -> None:
    """Ids from num_ids on may hold anything."""
    rows = torch.zeros(4, 300)
    rows[:, 70:] = torch.nan
    params = [PARAMS[name] for name in ("greedy", "temperature", "top-k-large", "top-p")]
    assert choose(rows, params, 70) == [expected(rows[0, :70], p) for p in params]


def test_edits_equal_the_reference() -> None:
    """Penalties, bias and a minimum length, each row with a history of its own: equal in bits."""
    num_ids, rows, mine, wanted = 500, [], [], []
    rng = np.random.default_rng(1)
    for i, (repetition, frequency, presence) in enumerate(
        [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (0.7, -1.1, 0.6)]
    ):
        history = rng.integers(0, 40, 30 + i).tolist()
        bias = ((3, 1.5), (7, -100.0), (200, 0.25))
        params = SamplingParams(
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            logit_bias=bias,
        )
        chooser = TokenChooser(
            params, num_ids, prompt_len=12, min_tokens=20 if i % 2 else 0, stop_token_ids=(7, 9)
        )
        row = make_row("few" if i == 3 else "normal", num_ids, i)
        wanted.append(chooser.adjusted(row, history))
        rows.append(row)
        # 18 + i tokens were said: row 1 is too short to end, row 3 is not.
        banned = (7, 9) if i == 1 else ()
        penalties = (repetition, frequency, presence)
        mine.append(RowEdits(history, history[12:], *penalties, dict(bias), banned))
    got = torch.stack([*rows, rows[0]])
    edits.edit(got, [*mine, RowEdits()])
    assert torch.equal(got.view(torch.int32)[:4], torch.stack(wanted).view(torch.int32))
    assert torch.equal(got[4], rows[0])
    untouched = got.clone()
    edits.edit(untouched, [RowEdits()] * 5)
    assert torch.equal(untouched, got)


def test_what_does_not_fit_is_refused() -> None:
    """Another type, another number of rows, ids out of range, too large a vocabulary."""
    table = settings_table([RowSettings(0, 8)])
    with pytest.raises(ValueError, match="float32"):
        sampling.choose(torch.zeros(1, 8, dtype=torch.float64), table)
    with pytest.raises(ValueError, match="2 rows"):
        sampling.choose(torch.zeros(2, 8), table)
    with pytest.raises(ValueError, match="524288"):
        sampling.choose(torch.zeros(1, 1).expand(1, 524289).contiguous(), table)
    with pytest.raises(ValueError, match="2 rows"):
        edits.edit(torch.zeros(1, 8), [RowEdits(), RowEdits()])
    with pytest.raises(ValueError, match="one of the 8"):
        edits.edit(torch.zeros(1, 8), [RowEdits(banned=(8,))])
    with pytest.raises(ValueError, match="float32"):
        edits.edit(torch.zeros(1, 8, dtype=torch.float16), [RowEdits(banned=(3,))])
