"""The tokens of a step, by compiled code and without: the same, and each one's trouble its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.engine.sampling import BadLogits, TokenChooser
from outrider.params import SamplingParams
from tests.support.implementations import IMPLEMENTATIONS, ops_of
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 500
PLAIN = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=7),
}
BY_HISTORY = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.0, seed=3),
    "presence": SamplingParams(presence_penalty=-1.0, seed=4),
    "bias": SamplingParams(logit_bias=((4, 9.0), (5, -100.0)), seed=5),
}


def wanted(params: SamplingParams, seed: int, num_right: int = 2) -> Rows:
    """Three rows behind a short text, with so many drafts that stand."""
    rows = 3 * torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    chooser = TokenChooser(
        params, VOCAB_SIZE, prompt_len=2, min_tokens=4, stop_token_ids=[9], num_tokens=490
    )
    history = [1, 2, 3, 4, 4]
    for row in rows:
        history.append(chooser.choose(row, history))
    drafts = history[5:7]
    if num_right < 2:
        drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
    return Rows(rows, chooser, history[:5], drafts)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_of_many_settings(implementation: str) -> None:
    """Each sequence gets what it would get alone in numpy, up to the first draft that falls."""
    params = [*PLAIN.values(), *BY_HISTORY.values()] * 3
    step = [wanted(each, seed, seed % 3) for seed, each in enumerate(params)]
    assert choose_tokens(step, ops_of(implementation).choose) == choose_tokens(step, None)
    for i, tokens in enumerate(choose_tokens(step, None)):
        assert isinstance(tokens, list)
        assert len(tokens) == i % 3 + 1
        assert tokens[:-1] == step[i].drafts[: i % 3]
    assert choose_tokens([], ops_of(implementation).choose) == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("params", [*PLAIN.values(), *BY_HISTORY.values()], ids=str)
def test_bad_logits_are_one_sequences_trouble(implementation: str, params: SamplingParams) -> None:
    """A row that holds no number fails the sequence that gets to it, and says so; no other."""
    good, bad = wanted(params, 1), wanted(params, 2)
    bad.logits[1, 77] = torch.nan
    unread = wanted(params, 3, num_right=0)
    unread.logits[1, 77] = torch.nan
    found = choose_tokens([good, bad, unread], ops_of(implementation).choose)
    assert found[0] == choose_tokens([good], None)[0]
    assert isinstance(found[1], BadLogits)
    assert str(found[1]) == "the best logit is nan"
    assert found[2] == choose_tokens([unread], None)[0]


class Elsewhere:
    """Logits of a device that is not the CPU."""

    def cpu(self) -> str:
        """The copy."""
        return "copied"


@pytest.mark.timeout(120)  # the first imports transformers
@pytest.mark.parametrize("on_device", [False, True])
def test_logits_stay_where_tokens_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """A step copies them to the CPU for operations that choose there, and for no others."""
    model = LlamaModel.load(make_tiny_model(tmp_path))
    model.ops = replace(model.ops, chooses_on_device=on_device)
    monkeypatch.setattr(model, "forward", lambda step, cache: Elsewhere())
    logits = Runner(model, 1).forward(Batch([BatchItem([1], 0, [0], 1)]))
    assert isinstance(logits, Elsewhere) if on_device else logits == "copied"


def test_which_settings_look_back() -> None:
    """Penalties, bias and a minimum length that is still ahead; nothing else."""
    for params in PLAIN.values():
        chooser = TokenChooser(
            params, VOCAB_SIZE, prompt_len=2, min_tokens=3, stop_token_ids=[9], num_tokens=490
        )
        assert [chooser.takes_logits_as_they_are(n) for n in (2, 4, 5, 6)] == [0, 0, 1, 1]
    for params in BY_HISTORY.values():
        assert not TokenChooser(params, VOCAB_SIZE, prompt_len=2).takes_logits_as_they_are(9)


def test_rows_of_another_size_are_refused() -> None:
    """A row that is not the vocabulary's fails its sequence, compiled or not."""
    rows = Rows(torch.zeros(1, 400), TokenChooser(SamplingParams(), 500, prompt_len=1), [1])
    for implementation in IMPLEMENTATIONS:
        found = choose_tokens([rows], ops_of(implementation).choose)
        assert isinstance(found[0], ValueError)
