"""Sampled tokens have exactly the target's distribution, whatever the drafts: many samples of a
target small enough to know every probability.

Targets and drafters are functions of the last two tokens. The reference applies the settings in its
own words, in the documented order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.rejection import draw_draft
from outrider.engine.sampling import TokenChooser
from outrider.engine.sparse_probs import SparseProbs
from outrider.params import SamplingParams
from tests.support.chi_square import TOO_UNLIKELY, assert_fits, p_value

VOCAB_SIZE = 7
PROMPT = [3, 1]
STOP_ID = 2
MIN_TOKENS = 1
NUM_JUDGED = 2
K = 2

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot, top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "all filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    "penalties": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
    },
    "bias": {"logit_bias": ((0, 2.0), (4, -3.0)), "temperature": 0.9},
}
Row = Callable[[Sequence[int]], np.ndarray]
Draft = Callable[[list[int], int], tuple[int, SparseProbs]]


def table_model(seed: int, spread: float = 1.5) -> Row:
    """Logits that depend on the last two tokens."""
    tables = np.random.default_rng(seed).normal(0, spread, (2, VOCAB_SIZE, VOCAB_SIZE))
    last, before = tables.astype(np.float32)
    return lambda history: last[history[-1]] + before[history[-2]] * np.float32(0.5)


TARGET, DRAFTER = table_model(1), table_model(2)


def reference_probs(row: np.ndarray, history: Sequence[int], params: SamplingParams) -> np.ndarray:
    """The distribution at position len(history), step by step."""
    logits = row.astype(np.float64)
    output = history[len(PROMPT) :]
    for token in set(history):
        factor = params.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, value in params.logit_bias:
        logits[token] += value
    if len(output) < MIN_TOKENS:
        logits[STOP_ID] = -np.inf
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    shares = weights[order] / weights[order].sum()
    order = order[: 1 + int(np.searchsorted(shares.cumsum(), params.top_p))]
    order = [token for token in order if weights[token] >= params.min_p * weights.max()]
    probs = np.zeros(VOCAB_SIZE)
    probs[order] = weights[order] / weights[order].sum()
    return probs


def exact_probs(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of every pair that may be generated."""
    found = {}
    for outcome in itertools.product(range(VOCAB_SIZE), repeat=NUM_JUDGED):
        prob, history = 1.0, list(PROMPT)
        for token in outcome:
            prob *= reference_probs(TARGET(history), history, params)[token]
            history.append(token)
        found[outcome] = prob
    return found


def chooser_for(params: SamplingParams) -> TokenChooser:
    """With a stop token that must not come first."""
    return TokenChooser(
        params,
        VOCAB_SIZE,
        prompt_len=len(PROMPT),
        min_tokens=MIN_TOKENS,
        stop_token_ids=[STOP_ID],
    )


def sample(params: SamplingParams, draft: Draft, rejection: bool) -> tuple[tuple[int, ...], int]:
    """The first tokens of one text, in rounds of K drafts; and how many drafts stood."""
    chooser = chooser_for(params)
    confirmed = list(PROMPT)
    accepted = 0
    while len(confirmed) < len(PROMPT) + NUM_JUDGED:
        line = list(confirmed)
        probs = []
        for _ in range(K):
            token, token_probs = draft(line, params.seed)
            line.append(token)
            probs.append(token_probs)
        ends = range(len(confirmed), len(line) + 1)
        rows = torch.from_numpy(np.stack([TARGET(line[:end]) for end in ends]))
        drafts = line[len(confirmed) :]
        sent = probs if rejection else ()
        (chosen,) = choose_tokens([Rows(rows, chooser, confirmed, drafts, 0, sent)], None)
        assert isinstance(chosen, list), chosen
        confirmed += chosen
        accepted += len(chosen) - 1
    return tuple(confirmed[len(PROMPT) : len(PROMPT) + NUM_JUDGED]), accepted


def model_draft(settings: dict) -> Draft:
    """A small model that draws from its own filtered distribution, and says so."""

    def draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
        chooser = chooser_for(SamplingParams(**settings, seed=seed))
        return draw_draft(chooser, torch.from_numpy(DRAFTER(history)), history)

    return draft


def matching_draft(settings: dict) -> Draft:
    """The same small model, which guesses with the target's own noise."""

    def draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
        chooser = chooser_for(SamplingParams(**settings, seed=seed))
        token = chooser.choose(torch.from_numpy(DRAFTER(history)), history)
        return token, SparseProbs.certain(token)

    return draft


def certain_draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
    """Always the same guess behind the same tokens, and nothing else was possible."""
    token = (history[-1] + 2 * history[-2]) % VOCAB_SIZE
    return token, SparseProbs.certain(token)


def bad_draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
    """Prefers what the target likes least, and says so truthfully; 0.8 + 0.2."""
    order = np.argsort(TARGET(history))
    ids = (int(order[0]), int(order[-1]))
    likely = np.random.default_rng([seed, len(history)]).random() < 0.8
    return ids[0] if likely else ids[1], SparseProbs(ids, (0.8, 0.2))


def lying_draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
    """As above, and reports that all were equally likely."""
    token, _ = bad_draft(history, seed)
    return token, SparseProbs(tuple(range(VOCAB_SIZE)), (1 / VOCAB_SIZE,) * VOCAB_SIZE)


def counts_of(
    settings: dict, draft: Draft, *, rejection: bool, num_samples: int
) -> tuple[Counter, int]:
    """Outcomes of that many seeds, and the number of accepted drafts."""
    counts: Counter = Counter()
    accepted = 0
    for seed in range(num_samples):
        outcome, stood = sample(SamplingParams(**settings, seed=seed), draft, rejection)
        counts[outcome] += 1
        accepted += stood
    return counts, accepted


def check(settings: dict, draft: Draft, *, rejection: bool, num_samples: int) -> None:
    """The outcomes fit, and drafts were both accepted and rejected on the way."""
    counts, accepted = counts_of(settings, draft, rejection=rejection, num_samples=num_samples)
    assert accepted > 0.05 * num_samples
    assert_fits(counts, exact_probs(SamplingParams(**settings)))


NUM_SAMPLES = pytest.mark.parametrize(
    "num_samples",
    [400, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)


@NUM_SAMPLES
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rejection_gives_the_targets_distribution(settings: dict, num_samples: int) -> None:
    """A model that draws behind the same settings."""
    check(settings, model_draft(settings), rejection=True, num_samples=num_samples)


@NUM_SAMPLES
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_exact_match_gives_the_targets_distribution(settings: dict, num_samples: int) -> None:
    """A model that guesses with the same noise: the noise must not shine through."""
    check(settings, matching_draft(settings), rejection=False, num_samples=num_samples)


@NUM_SAMPLES
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.8}])
@pytest.mark.parametrize("draft", [certain_draft, bad_draft])
def test_rejection_bears_any_honest_drafter(draft: Draft, settings: dict, num_samples: int) -> None:
    """One that always says the same, and one that prefers what the target would not say."""
    check(settings, draft, rejection=True, num_samples=num_samples)


def test_the_test_would_notice() -> None:
    """A drafter that lies about its distribution bends the output, and the fit says so."""
    counts, _ = counts_of({}, lying_draft, rejection=True, num_samples=1000)
    assert p_value(counts, exact_probs(SamplingParams())) < TOO_UNLIKELY


def test_greedy_rejection_is_greedy() -> None:
    """At temperature 0 the text is the target's own, whatever is drafted."""
    settings = {"temperature": 0.0}
    history = list(PROMPT)
    for _ in range(NUM_JUDGED):
        history.append(
            chooser_for(SamplingParams(**settings)).choose(
                torch.from_numpy(TARGET(history)), history
            )
        )
    for draft in (certain_draft, bad_draft, model_draft(settings)):
        for seed in range(20):
            outcome, _ = sample(SamplingParams(**settings, seed=seed), draft, True)
            assert list(outcome) == history[len(PROMPT) :]


def test_equal_distributions_accept_everything() -> None:
    """A drafter that has the target's own distribution is never rejected."""

    def draft(history: list[int], seed: int) -> tuple[int, SparseProbs]:
        chooser = chooser_for(SamplingParams(seed=seed))
        return draw_draft(chooser, torch.from_numpy(TARGET(history)), history)

    for seed in range(200):
        _, accepted = sample(SamplingParams(seed=seed), draft, rejection=True)
        assert accepted == K


def test_what_is_reported_is_what_was_drawn_from() -> None:
    """The drafter's tokens fit the few float32 probabilities that it names; they sum to 1."""
    history = list(PROMPT)
    row = torch.from_numpy(np.random.default_rng(5).normal(0, 1, 500).astype(np.float32))
    counts: Counter = Counter()
    for seed in range(3000):
        chooser = TokenChooser(SamplingParams(seed=seed, temperature=0.5), 500, prompt_len=2)
        token, probs = draw_draft(chooser, row, history)
        assert probs.is_valid and len(probs.ids) == 64
        assert [float(np.float32(p)) for p in probs.probs] == list(probs.probs)
        counts[token] += 1
    total = sum(probs.probs)
    assert_fits(counts, {i: p / total for i, p in zip(probs.ids, probs.probs, strict=True)})
