"""A step's tokens, chosen where its logits lie: the engine's numpy's, whatever the settings are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.engine.choosing import Rows, choose_tokens, token_logprobs
from outrider.engine.rejection import draw_draft
from outrider.engine.sampling import BadLogits, TokenChooser, logprobs
from outrider.params import SamplingParams
from outrider_kernels.triton_ops import choosing
from tests.kernels.triton.interpreted.readings import Readings

VOCAB_SIZE, NUM_TOKENS, STOP = 500, 490, 9
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=7),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.0, seed=3),
    "presence": SamplingParams(presence_penalty=-1.0, seed=4),
    "bias": SamplingParams(logit_bias=((4, 9.0), (5, -100.0)), seed=5),
}
HISTORY = [1, 2, 3, 4, 4]


def make_step(num_rows: int, params: Sequence[SamplingParams]) -> list[Rows]:
    """Sequences with so many rows each, one behind the other in the step's logits.

    As many drafts stand as the sequence's number allows; a stop token must not come before the
    fourth token, so it is banned in some of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows * len(params), VOCAB_SIZE, generator=generator)
    logits[:, STOP] += 5
    step = []
    for i, each in enumerate(params):
        chooser = TokenChooser(
            each, VOCAB_SIZE, prompt_len=2, min_tokens=4, stop_token_ids=[STOP],
            num_tokens=NUM_TOKENS,
        )  # fmt: skip
        history = list(HISTORY)
        for row in logits[num_rows * i : num_rows * i + num_rows - 1]:
            history.append(chooser.choose(row, history))
        drafts = history[len(HISTORY) :]
        if i % num_rows < len(drafts):
            drafts[i % num_rows] = (drafts[i % num_rows] + 1) % NUM_TOKENS
        step.append(Rows(logits, chooser, HISTORY, drafts, num_rows * i))
    return step


def choose(step: Sequence[Rows]) -> list[list[int] | Exception]:
    """On the device."""
    return choose_tokens(step, choosing.choose, on_device=True)


def test_tokens_are_those_of_the_reference() -> None:
    """All settings in one step, drafts that stand and fall; logits stay what they were."""
    step = make_step(3, [*PARAMS.values()] * 2)
    before = step[0].logits.clone()
    found = choose(step)
    assert found == choose_tokens(step, None)
    assert {len(tokens) for tokens in found if isinstance(tokens, list)} == {1, 2, 3}
    assert torch.equal(step[0].logits, before)
    assert choose([]) == []


def test_some_rows_of_a_step() -> None:
    """Rows that nobody chooses from, between those of sequences, and logits of several steps."""
    for names in (["greedy", "sampled"], ["greedy", "frequency"]):
        params = [PARAMS[name] for name in names]
        one, other = make_step(2, [*params, *params]), make_step(3, params)
        for step in ([one[0]], [one[3]], [one[1], one[3]], [*one[2:], *other]):
            assert choose(step) == choose_tokens(step, None)


def test_wider_rows_are_cut_to_what_both_models_have() -> None:
    """A drafter may have more ids than its target."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 450], logits[0, 20] = 9.0, 1.0
    for params in (PARAMS["greedy"], replace(PARAMS["repetition"], repetition_penalty=1.1)):
        rows = [Rows(logits, TokenChooser(params, 400, prompt_len=1), [1])]
        assert choose(rows) == choose_tokens(rows, None) == [[20]]


@pytest.mark.parametrize("name", PARAMS)
def test_bad_logits_are_one_sequences_trouble(name: str) -> None:
    """A row that holds no number fails the sequence that gets to it, and says so; no other."""
    step = make_step(3, [PARAMS[name]] * 3)  # the first two end before their last row
    step[0].logits[[2, 5, 8], 77] = torch.nan
    found = choose(step)
    assert found[:2] == choose_tokens(step[:2], None)
    assert isinstance(found[2], BadLogits) and str(found[2]) == "the best logit is nan"


def test_nothing_to_choose_is_told_with_what_settings_made_of_it() -> None:
    """Everything else is banned by the model, and what is left by the settings."""
    step = make_step(1, [PARAMS["greedy"]])
    step[0].logits.fill_(-torch.inf)[0, STOP] = 1.0
    (error,) = choose(step)
    assert isinstance(error, BadLogits) and str(error) == "the best logit is -inf"


def test_a_sequence_whose_rows_do_not_fit_fails_alone() -> None:
    """The others are chosen."""
    good = make_step(1, [PARAMS["greedy"]])[0]
    bad = Rows(torch.zeros(1, 400), good.chooser, HISTORY)
    found = choose([bad, good])
    assert isinstance(found[0], ValueError)
    assert found[1:] == choose_tokens([good], None)


def test_drafts_stand_by_chance_beside_those_that_match() -> None:
    """Each sequence gets the tokens of its own mode, in the order of the step."""
    step = make_step(3, [*PARAMS.values()] * 2)
    mixed = []
    for i, rows in enumerate(step):
        if i % 2:
            drafts, probs = [], []
            for row in (0, 1):
                like = rows.own[row] if i % 4 == 1 else rows.own[row].flip(0)
                token, sent = draw_draft(rows.chooser, like, [*HISTORY, *drafts])
                drafts.append(token)
                probs.append(sent)
            rows = rows._replace(drafts=drafts, draft_probs=probs)
        mixed.append(rows)
    with Readings() as readings:
        found = choose(mixed)
    assert readings.names == ["tolist"]  # the tokens of all, in one go
    assert found == choose_tokens(mixed, None)
    by_chance = [tokens for tokens in found[1::2] if isinstance(tokens, list)]
    assert {1, 3} <= {len(tokens) for tokens in by_chance}


def test_ids_that_no_vocabulary_has() -> None:
    """A drafter may name them; they count in the sum and are never drawn."""
    step = make_step(2, [PARAMS["sampled"]])
    token, sent = draw_draft(step[0].chooser, step[0].logits[0], HISTORY)
    sent = replace(sent, ids=(*sent.ids[:-1], 2**32 - 1)) if sent.ids[-1] != token else sent
    rows = [step[0]._replace(drafts=[token], draft_probs=[sent])]
    assert choose(rows) == choose_tokens(rows, None)


def test_a_warm_start_chooses_and_changes_nothing() -> None:
    """One row is enough for it."""
    logits = torch.randn(1, VOCAB_SIZE)
    before = logits.clone()
    choosing.warm(logits)
    assert torch.equal(logits, before)


def test_logprobs_of_tokens() -> None:
    """In one go: those of the engine, but for rounding."""
    logits = 3 * torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows, tokens = [2, 0, 3], [7, 499, 0]
    expected = [logprobs(logits[row], token)[0] for row, token in zip(rows, tokens, strict=True)]
    assert token_logprobs(logits, rows, tokens, on_device=False) == expected
    assert token_logprobs(logits, rows, tokens, on_device=True) == pytest.approx(expected, abs=1e-5)
    with Readings() as readings:
        assert token_logprobs(logits, [], [], on_device=True) == []
        assert readings.names == []
        token_logprobs(logits, rows, tokens, on_device=True)
    assert readings.names == ["tolist"]
