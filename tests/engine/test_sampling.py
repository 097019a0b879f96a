"""The token chooser: what the filters keep, how often tokens are chosen, and who wins a tie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine import sampling
from outrider.engine.sampling import BadLogits, TokenChooser, logprobs
from outrider.params import SamplingParams
from outrider_kernels.noise import gumbel_array

VOCAB_SIZE = 1000
NO_FILTER = SamplingParams(temperature=1.0)


def make_row(vocab_size: int = VOCAB_SIZE, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Random logits."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab_size, generator=generator)


def chooser(params: SamplingParams, vocab_size: int = VOCAB_SIZE, **kwargs: object) -> TokenChooser:
    """A chooser whose text has a prompt of two tokens unless told otherwise."""
    return TokenChooser(params, vocab_size, **{"prompt_len": 2, **kwargs})  # type: ignore[arg-type]


def kept(params: SamplingParams, row: torch.Tensor, history: list[int]) -> set[int]:
    """Ids that the filters keep."""
    return set(chooser(params, row.numel()).candidates(row, history).ids.tolist())


PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(top_k=17),
    "top-k-beyond-vocabulary": SamplingParams(top_k=5000),
    "top-p": SamplingParams(top_p=0.9),
    "top-p-tiny": SamplingParams(top_p=1e-6),
    "top-p-flat": SamplingParams(temperature=30.0, top_p=0.7),
    "min-p": SamplingParams(min_p=0.02),
    "repetition": SamplingParams(repetition_penalty=1.3, top_k=40),
    "all": SamplingParams(temperature=1.4, top_k=60, top_p=0.8, min_p=0.01, repetition_penalty=0.8),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PARAMS)
def test_kept_tokens_equal_those_of_transformers(name: str, seed: int) -> None:
    """The same set and the same probabilities as transformers' processors in the same order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    params, row = PARAMS[name], make_row(seed=seed)
    history = [5, 7, 5, 100, 999]
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    expected = torch.softmax(steps(torch.tensor([history]), row[None].clone())[0], -1).numpy()

    candidates = chooser(params).candidates(row, history)
    weights = np.exp(candidates.scores.astype(np.float64))
    probs = np.zeros(VOCAB_SIZE)
    probs[candidates.ids] = weights / weights.sum()
    assert set(candidates.ids.tolist()) == set(np.flatnonzero(expected).tolist())
    np.testing.assert_allclose(probs, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", PARAMS)
def test_choice_is_the_best_score_plus_noise(name: str) -> None:
    """The shortcuts that skip losers never change the winner of the definition."""
    for vocab_size, spread in ((VOCAB_SIZE, 3.0), (5003, 0.3), (5003, 8.0)):
        row = make_row(vocab_size, spread=spread)
        for seed in range(15):
            params = replace(PARAMS[name], seed=seed << 40)
            history = list(range(seed + 2))
            this = chooser(params, vocab_size)
            candidates = this.candidates(row, history)
            noise = gumbel_array(params.seed, len(history), candidates.ids)
            best = candidates.ids[(candidates.scores + noise).argmax()]
            assert this.choose(row, history) == best


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.2),
    ],
    ids=["temperature", "top-k", "top-p", "min-p"],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_choices_follow_the_filtered_distribution(params: SamplingParams, vary: str) -> None:
    """Chi-square of 6,000 choices against the exact probabilities, over seeds and positions."""
    row, num_draws = make_row(12, spread=1.5), 6000
    counts = np.zeros(12)
    for i in range(num_draws):
        seed, position = (i * 7919, 5) if vary == "seed" else (3, i + 2)
        this = chooser(replace(params, seed=seed), 12)
        counts[this.choose(row, range(position))] += 1  # type: ignore[arg-type]
    candidates = chooser(params, 12).candidates(row, [0, 0])
    weights = np.exp(candidates.scores.astype(np.float64))
    expected = num_draws * weights / weights.sum()
    assert counts.sum() == counts[candidates.ids].sum()
    chi_square = ((counts[candidates.ids] - expected) ** 2 / expected).sum()
    degrees = candidates.ids.size - 1
    # Above this with a chance of about 1 in 30,000 (normal approximation of the cube root).
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < limit


def test_large_vocabulary_takes_the_shortcut_and_keeps_the_distribution() -> None:
    """With more ids than get noise at once, two halves of equal weight are chosen equally often."""
    row = make_row(4000, spread=0.5)
    row[2000:] = row[:2000]
    low = sum(chooser(SamplingParams(seed=s), 4000).choose(row, [1, 2]) < 2000 for s in range(2000))
    assert abs(low - 1000) < 4 * 22.4  # four standard deviations


@pytest.mark.parametrize("best", [[3], [7, 3], [999, 3, 500]])
def test_greedy_takes_the_lowest_of_equal_tokens(best: list[int]) -> None:
    """Argmax with ties to the lowest id, untouched by seed and filters."""
    row = make_row()
    row[best] = 50.0
    params = SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9, seed=9)
    assert chooser(params).choose(row, [1, 2]) == min(best)
    assert kept(params, row, [1, 2]) == {min(best)}


def test_ties_at_the_border_go_to_the_lowest_ids() -> None:
    """top_k keeps exactly k, top_p the shortest prefix of the order (logit, lowest id first)."""
    row = torch.zeros(VOCAB_SIZE)
    row[500] = 1.0
    assert kept(SamplingParams(top_k=4), row, [0, 0]) == {500, 0, 1, 2}
    row = torch.full((VOCAB_SIZE,), -100.0)
    row[[10, 20, 30, 40]] = 1.0
    assert kept(SamplingParams(top_p=0.5), row, [0, 0]) == {10, 20}
    assert kept(SamplingParams(top_p=0.51), row, [0, 0]) == {10, 20, 30}


def test_penalties_count_what_they_should() -> None:
    """Repetition sees prompt and output, frequency and presence the output alone."""
    row = torch.full((VOCAB_SIZE,), 2.0)
    row[3] = -2.0
    history = [3, 4, 5, 5]  # the prompt is 3 and 4

    def scores(params: SamplingParams) -> torch.Tensor:
        candidates = chooser(params).candidates(row, history)
        values = torch.full((VOCAB_SIZE,), torch.nan)
        values[torch.from_numpy(candidates.ids)] = torch.from_numpy(candidates.scores)
        return values - values[0]  # relative to a token that nothing touches

    repetition = scores(SamplingParams(repetition_penalty=2.0))
    assert repetition[[3, 4, 5, 6]].tolist() == [-6.0, -1.0, -1.0, 0.0]
    frequency = scores(SamplingParams(frequency_penalty=0.5))
    assert frequency[[3, 4, 5, 6]].tolist() == [-4.0, 0.0, -1.0, 0.0]
    presence = scores(SamplingParams(presence_penalty=0.5))
    assert presence[[3, 4, 5, 6]].tolist() == [-4.0, 0.0, -0.5, 0.0]
    bias = scores(SamplingParams(logit_bias=((4, 1.5), (5, -100.0))))
    assert bias[[3, 4, 5]].tolist() == [-4.0, 1.5, -100.0]


def test_stop_tokens_are_banned_before_the_minimum_length() -> None:
    """A stop id cannot win before min_tokens generated tokens, whatever its bias; after, it can."""
    params = SamplingParams(temperature=0.0, logit_bias=((9, 100.0),))
    this = chooser(params, min_tokens=2, stop_token_ids=[9, 2000])
    row = make_row()
    assert this.choose(row, [1, 2]) != 9
    assert this.choose(row, [1, 2, 3]) != 9
    assert this.choose(row, [1, 2, 3, 3]) == 9


def test_the_row_is_never_changed() -> None:
    """Settings that edit logits work on a copy: another sequence may read the same row."""
    row = make_row()
    before = row.clone()
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0, logit_bias=((1, 3.0),)
    )
    for these in (params, replace(params, temperature=0.0), SamplingParams(top_p=0.5)):
        chooser(these, min_tokens=9, stop_token_ids=[4]).choose(row, [1, 2, 3, 1])
        assert torch.equal(row, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_best_are_refused(bad: float, temperature: float) -> None:
    """NaN anywhere, +inf anywhere, or nothing but -inf: an error, never token 0."""
    row = make_row()
    if bad == float("-inf"):
        row.fill_(bad)
    else:
        row[77] = bad
    with pytest.raises(BadLogits):
        chooser(SamplingParams(temperature=temperature)).choose(row, [1, 2])


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Division by almost nothing neither overflows to NaN nor changes the winner."""
    row = make_row()
    assert chooser(SamplingParams(temperature=temperature)).choose(row, [1, 2]) == row.argmax()


def test_banned_tokens_are_never_chosen() -> None:
    """-inf logits stay impossible through every filter, also when little else is left."""
    row = torch.full((VOCAB_SIZE,), -torch.inf)
    row[[4, 900]] = 0.0
    for params in PARAMS.values():
        for seed in range(20):
            assert chooser(replace(params, seed=seed)).choose(row, [1, 2]) in (4, 900)


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.05, 50),
    top_k=st.sampled_from([0, 1, 3, 200, 2000]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([0.0, 0.01, 1.0, 10.0]),
)
def test_choice_is_a_function_of_its_arguments(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, spread: float
) -> None:
    """The same bits in give the same token, from any memory and with any number of threads."""
    params = SamplingParams(temperature, top_k, top_p, min_p, seed)
    row = make_row(spread=spread)
    shifted = torch.cat([torch.zeros(1), row])[1:]  # another alignment
    strided = torch.stack([row, row], 1)[:, 0]
    before = torch.get_num_threads()
    first = chooser(params).choose(row, [1, 2, 3])
    try:
        for num_threads, same in ((1, row), (2, shifted), (1, strided)):
            torch.set_num_threads(num_threads)
            assert chooser(params).choose(same, [1, 2, 3]) == first
    finally:
        torch.set_num_threads(before)
    assert first in kept(params, row, [1, 2, 3])


def test_logprobs_ignore_all_settings() -> None:
    """log_softmax of the raw row, and the likeliest tokens with ties to the lowest id."""
    row = make_row()
    row[[600, 50]] = row.max() + 1
    expected = torch.log_softmax(row.double(), 0)
    value, top = logprobs(row, 123, num_top=4)
    assert value == pytest.approx(expected[123].item(), abs=1e-5)
    assert [token for token, _ in top[:2]] == [50, 600]
    assert [token for token, _ in top] == [50, 600, *expected.topk(4).indices[2:].tolist()]
    for token, logprob in top:
        assert logprob == pytest.approx(expected[token].item(), abs=1e-5)
    assert logprobs(row, 123)[1] == []


def test_a_row_of_another_size_is_refused() -> None:
    """A row that is not the vocabulary's is a mistake of the caller."""
    with pytest.raises(ValueError, match="1000"):
        chooser(NO_FILTER).choose(make_row(999), [1, 2])


def test_pilots_need_no_particular_order() -> None:
    """With the best tokens at the end of the vocabulary, the winner is still the true one."""
    row = torch.linspace(-5, 5, 3000)
    assert sampling._SMALL < 3000
    for seed in range(10):
        params = SamplingParams(seed=seed)
        noise = gumbel_array(seed, 2, np.arange(3000))
        expected = ((row.numpy() - row.max().numpy()) + noise).argmax()
        assert chooser(params, 3000).choose(row, [1, 2]) == expected


def test_padding_of_the_logits_is_never_chosen() -> None:
    """Greedy or sampled, biased or not: only ids below num_tokens come out, and the row stays."""
    row = torch.zeros(10)
    row[7:] = 50.0
    before = row.clone()
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, seed=1),
        SamplingParams(temperature=1.0, seed=2, top_k=4, logit_bias=((9, 100.0),)),
    ):
        limited = chooser(params, 10, num_tokens=7)
        assert all(limited.choose(row, [9] * length) < 7 for length in range(1, 40))
        assert torch.equal(row, before)


@pytest.mark.parametrize("num_ids", [384, 3000])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9999999},
        {"top_p": 0.9999999, "temperature": 2.0},
        {"top_k": 300, "temperature": 100.0},
        {"top_k": -1, "temperature": 100.0},  # all but one
    ],
)
def test_filters_that_keep_nearly_everything_choose_by_score_and_noise(
    num_ids: int, settings: dict[str, float]
) -> None:
    """Many candidates, best first: each is judged by its own noise, and the best sum wins."""
    if settings.get("top_k") == -1:
        settings = settings | {"top_k": num_ids - 1}
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(num_ids, generator=generator)
    history = [1] * 5
    for seed in range(60):
        chooser = TokenChooser(SamplingParams(seed=seed, **settings), num_ids, prompt_len=1)
        kept = chooser.candidates(row, history)
        noisy = kept.scores + gumbel_array(seed, len(history), kept.ids)
        assert chooser.choose(row, history) == int(kept.ids[noisy == noisy.max()].min())
