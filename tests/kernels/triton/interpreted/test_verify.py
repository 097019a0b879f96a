"""Verification on the device: the engine's tokens on the same random numbers, for any drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.rejection import draw_draft, replacement
from outrider.engine.sampling import TokenChooser
from outrider.engine.sparse_probs import SparseProbs
from outrider.params import SamplingParams
from outrider_kernels.triton_ops import matching, rejection, sampling
from outrider_kernels.triton_ops.configs_sampling import MAX_DRAFTS
from outrider_kernels.triton_ops.rounds import NO_ID, Rounds
from outrider_kernels.triton_ops.settings import RowSettings, settings_table

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.2, top_k=20),
    "top-p": SamplingParams(temperature=0.9, top_p=0.9),
    "all": SamplingParams(temperature=1.3, top_k=50, top_p=0.95, min_p=0.02),
}


@dataclass
class Case:
    """One sequence's round."""

    rows: torch.Tensor
    """float32 [1 + drafts, vocab]"""
    params: SamplingParams
    position: int
    drafts: list[int]
    probs: list[SparseProbs]

    @property
    def chooser(self) -> TokenChooser:
        """Of this sequence."""
        return TokenChooser(self.params, self.rows.shape[1], prompt_len=1)

    def settings(self) -> list[RowSettings]:
        """Of each row."""
        p, num_ids = self.params, self.rows.shape[1]
        filters = (p.seed, p.temperature, p.top_k, p.top_p, p.min_p)
        positions = range(self.position, self.position + len(self.rows))
        return [RowSettings(position, num_ids, *filters) for position in positions]

    def expected(self) -> list[int]:
        """What the engine's rejection gives."""
        history, chooser = [0] * self.position, self.chooser
        for row, draft, probs in zip(self.rows[:-1], self.drafts, self.probs, strict=True):
            token = replacement(chooser, row, history, draft, probs)
            history.append(draft if token is None else token)
            if token is not None:
                return history[self.position :]
        return [*history[self.position :], chooser.choose(self.rows[-1], history)]


def make_case(name: str, num_ids: int, num_drafts: int, seed: int, likeness: float) -> Case:
    """Drafts drawn from logits like the target's, each with what it was drawn from."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(num_drafts + 1, num_ids, generator=generator)
    other = 3 * torch.randn(num_drafts, num_ids, generator=generator)
    params = replace(PARAMS[name], seed=seed * 0x9E3779B97F4A7C15 % 2**64)
    case = Case(rows, params, 5 + seed, [], [])
    for i in range(num_drafts):
        draft_row = likeness * rows[i] + (1 - likeness) * other[i]
        draft, probs = draw_draft(case.chooser, draft_row, [0] * (case.position + i))
        case.drafts.append(draft)
        case.probs.append(probs)
    return case


def emitted(tokens: torch.Tensor, counts: torch.Tensor) -> list[list[int]]:
    """Of each sequence; what lies behind them is -1."""
    found = []
    for row, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        assert row[count:] == [-1] * (1 + MAX_DRAFTS - count)
        found.append(row[:count])
    return found


def reject(cases: Sequence[Case]) -> list[list[int]]:
    """By the kernels, in one step."""
    probs = [[dict(zip(q.ids, q.probs, strict=True)) for q in case.probs] for case in cases]
    rounds = Rounds.pack([case.drafts for case in cases], probs)
    settings = settings_table([row for case in cases for row in case.settings()])
    return emitted(*rejection.reject(torch.cat([case.rows for case in cases]), settings, rounds))


@pytest.mark.parametrize("num_ids", [16, 1000, 2051])
def test_rejection_gives_the_tokens_of_the_reference(num_ids: int) -> None:
    """Ragged rounds of all settings in one step, drafts from good to useless."""
    cases = [
        make_case(name, num_ids, num_drafts, 7 * i + num_drafts, (0.0, 0.5, 0.95)[num_drafts % 3])
        for i, name in enumerate(PARAMS)
        for num_drafts in ((0, 1, 2, 5) if num_ids < 2000 else (2,))
    ]
    assert reject(cases) == [case.expected() for case in cases]


@pytest.mark.slow
def test_rejection_at_length() -> None:
    """Many rounds of a small vocabulary: all ways in which they can end, and each of them often."""
    cases = [
        make_case(name, 40, seed % 6, seed, (0.3, 0.9)[seed % 2])
        for name in PARAMS
        for seed in range(16)
    ]
    wanted = [case.expected() for case in cases]
    assert reject(cases) == wanted
    whole = sum(tokens[:-1] == case.drafts for tokens, case in zip(wanted, cases, strict=True))
    assert 10 < whole < len(cases) - 10


def test_rejection_in_a_large_vocabulary() -> None:
    """A draft that falls, and whose distribution is spread over many blocks."""
    case = make_case("temperature", 49152, 1, 11, 0.6)
    assert reject([case]) == [case.expected()]


def test_drafts_without_probabilities() -> None:
    """A proposer that would always have said the same; tokens that the filters leave out."""
    cases = []
    for seed in range(6):
        case = make_case("top-k", 300, 2, seed, 0.9)
        case.probs = [SparseProbs.certain(draft) for draft in case.drafts]
        cases.append(case)
    cases[0].drafts[0] = int(cases[0].rows[0].argmin())
    cases[0].probs[0] = SparseProbs.certain(cases[0].drafts[0])
    wanted = [case.expected() for case in cases]
    assert len(wanted[0]) == 1
    assert reject(cases) == wanted


def test_nothing_lacking_falls_back_to_the_target() -> None:
    """The draft had no chance with the target, and takes nothing from the one token that has."""
    rows = torch.full((2, 50), -torch.inf)
    rows[:, 20] = 1.0
    case = Case(rows, SamplingParams(seed=3), 4, [30], [SparseProbs((20, 30), (1.0, 1e-30))])
    assert case.expected() == [20]
    assert reject([case]) == [[20]]


def test_a_missing_draft_ends_the_round() -> None:
    """-1 is no draft: its row is chosen from as if nothing had been drafted there."""
    case = make_case("temperature", 100, 3, 8, 0.999)
    assert len(case.expected()) > 2
    case.drafts[1], case.probs[1] = -1, SparseProbs((), ())
    history = [0] * case.position + case.drafts[:1]
    assert reject([case]) == [[case.drafts[0], case.chooser.choose(case.rows[1], history)]]


def test_bad_rows_are_told() -> None:
    """A row that is not numbers ends its sequence with -1, and no other one."""
    cases = [make_case("all", 100, 2, seed, 0.999) for seed in range(3)]
    wanted = [case.expected() for case in cases]
    assert len(wanted[1]) > 1
    cases[1].rows[1, 5] = torch.nan
    assert reject(cases) == [wanted[0], [cases[1].drafts[0], -1], wanted[2]]


@pytest.mark.parametrize("num_ids", [1000, 2051])
def test_exact_matching_gives_the_tokens_of_the_reference(num_ids: int) -> None:
    """Ragged rounds: drafts all right, wrong somewhere, missing, or none at all."""
    cases, sequences = [], []
    for i, name in enumerate(PARAMS):
        case = make_case(name, num_ids, i, 40 + i, 0.0)
        history = [0] * case.position
        for row in case.rows:
            history.append(case.chooser.choose(row, history))
        case.drafts = history[case.position : -1]
        if i in (2, 4):
            case.drafts[i // 2] = (case.drafts[i // 2] + 1) % num_ids if i == 2 else -1
        cases.append(case)
        sequences.append(
            Rows(case.rows, case.chooser, history[: case.position], tuple(case.drafts))
        )
    rounds = Rounds.pack([case.drafts for case in cases])
    settings = settings_table([row for case in cases for row in case.settings()])
    chosen = sampling.choose(torch.cat([case.rows for case in cases]), settings)
    got = emitted(*matching.accept(chosen, rounds))
    assert got == choose_tokens(sequences, None)
    assert [len(tokens) for tokens in got] == [1, 2, 2, 4, 3]


def test_exact_matching_of_bad_rows() -> None:
    """-1 is never equal to a missing draft, and is the last of its sequence."""
    rounds = Rounds.pack([[4, -1, 6], [], [7]])
    got = emitted(*matching.accept(torch.tensor([4, -1, 6, 9, -1, 7, 8]), rounds))
    assert got == [[4, -1], [-1], [7, 8]]


def test_as_many_drafts_as_a_service_may_ask_for() -> None:
    """All of them right, and no room left."""
    drafts = list(range(MAX_DRAFTS))
    got = emitted(*matching.accept(torch.tensor([*drafts, 5]), Rounds.pack([drafts])))
    assert got == [[*drafts, 5]]


def test_no_sequences_are_no_work() -> None:
    """A step may be empty."""
    tokens, counts = matching.accept(torch.empty(0, dtype=torch.int64), Rounds.pack([]))
    assert tokens.shape == (0, 1 + MAX_DRAFTS)
    assert counts.shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    """Too many drafts, distributions that do not fit, other rows than those of the rounds."""
    with pytest.raises(ValueError, match="at most 64"):
        Rounds.pack([[0] * 65])
    with pytest.raises(ValueError, match="draft 3"):
        Rounds.pack([[3]], [[{4: 1.0}]])
    with pytest.raises(ValueError, match="65 entries"):
        Rounds.pack([[3]], [[dict.fromkeys(range(65), 0.01)]])
    with pytest.raises(ValueError, match="2 of the rounds"):
        matching.accept(torch.zeros(3, dtype=torch.int64), Rounds.pack([[3]]))
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="distributions"):
        rejection.reject(logits, settings_table([RowSettings(0, 8)] * 2), Rounds.pack([[3]]))


def test_distributions_travel_in_order() -> None:
    """Entries rise by id, whatever order they came in, and the last row has none."""
    rounds = Rounds.pack([[9]], [[{9: 0.25, 2: 0.75}]])
    assert rounds.draft_ids is not None and rounds.draft_probs is not None
    assert rounds.draft_ids[:, :3].tolist() == [[2, 9, NO_ID], [NO_ID] * 3]
    assert np.allclose(rounds.draft_probs[0, :3], [0.75, 0.25, 0.0])
