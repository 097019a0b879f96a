"""The tail in rejection mode: each draft keeps the distribution that it was drawn from."""

from __future__ import annotations

import random

import pytest

from outrider.engine.sparse_probs import SparseProbs
from protos.outrider.v1 import draft_pb2
from target_service.draft_tail import Arrival, DraftTail, DraftTotals, ProposedTokens, Unused
from target_service.draft_wire import sparse_probs_from_proto

VOCAB = 100
MAX_TAIL = 6


def probs_for(token: int, mark: int = 0) -> SparseProbs:
    """A distribution that allows `token`; `mark` tells two of them apart."""
    return SparseProbs((token, VOCAB + mark), (0.5, 0.5))


def make_tail(confirmed: list[int]) -> tuple[DraftTail, DraftTotals]:
    """An empty tail of a sequence in rejection mode."""
    totals = DraftTotals()
    return DraftTail(confirmed, VOCAB, MAX_TAIL, totals, with_probs=True), totals


def proposed(start: int, *tokens: int, seen: int = 3, mark: int = 0) -> ProposedTokens:
    """An honest proposal."""
    return ProposedTokens(1, seen, start, tokens, [probs_for(t, mark) for t in tokens])


def test_distributions_stay_with_their_tokens() -> None:
    """Through appending, verification, trimming and the window's end."""
    confirmed = [0, 1, 2]
    tail, totals = make_tail(confirmed)
    tail.add(proposed(3, 5, 6))
    tail.add(proposed(5, 7, 8, 9, 10, 11))
    assert tail.tokens == [5, 6, 7, 8, 9, 10]
    assert tail.probs == [probs_for(token) for token in tail.tokens]
    tail.begin_round(2)
    confirmed.extend([5, 6, 7])
    tail.advance(2, 3)
    assert tail.tokens == [8, 9, 10]
    assert tail.probs == [probs_for(token) for token in tail.tokens]
    assert totals.unused == {Unused.WINDOW: 1, Unused.TRIMMED: 1}
    tail.begin_round(1)
    confirmed.append(4)
    tail.advance(1, 1)
    assert (tail.tokens, tail.probs) == ([], [])


def test_what_was_confirmed_meanwhile_is_cut_with_its_distribution() -> None:
    """A proposal that crosses an update loses its beginning, tokens and distributions alike."""
    confirmed = [0, 1, 2]
    tail, totals = make_tail(confirmed)
    confirmed.append(5)
    tail.advance(0, 1)
    tail.add(proposed(3, 5, 6, 7))
    assert (tail.tokens, tail.probs) == ([6, 7], [probs_for(6), probs_for(7)])
    assert totals.unused == {Unused.LATE: 1}


@pytest.mark.parametrize("second", [5, 9], ids=["the same token", "another token"])
def test_a_later_draw_counts_whatever_it_is(second: int) -> None:
    """Keeping the first where both agree would prefer what is drawn twice."""
    tail, totals = make_tail([0, 1, 2])
    tail.add(proposed(3, 5, 6))
    tail.add(proposed(3, second, mark=1))
    assert (tail.tokens, tail.probs) == ([second], [probs_for(second, 1)])
    assert totals.unused == {Unused.REPLACED: 2}


@pytest.mark.parametrize("bad", [None, SparseProbs((7,), (1.0,)), SparseProbs((6, 7), (0.0, 1.0))])
def test_a_draft_without_a_chance_ends_its_proposal(bad: SparseProbs | None) -> None:
    """What comes before it is used, the rest is malformed; alone it is no proposal at all."""
    tail, totals = make_tail([0, 1, 2])
    tail.add(ProposedTokens(1, 3, 3, [5, 6, 7], [probs_for(5), bad, probs_for(7)]))
    assert (tail.tokens, tail.probs) == ([5], [probs_for(5)])
    tail.add(ProposedTokens(1, 3, 4, [6], [bad]))
    tail.add(ProposedTokens(1, 3, 4, [6]))
    assert tail.tokens == [5]
    assert not tail.exhausted
    assert totals.unused == {Unused.MALFORMED: 4}
    assert totals.arrivals == {Arrival.USED: 1, Arrival.MALFORMED: 2}


def test_drafts_that_never_have_distributions_are_no_gap() -> None:
    """A drafter that sends none goes on behind what could not be used. The prefix once more would
    change nothing; and whoever waits for more of it, waits in vain."""
    confirmed = [0, 1, 2]
    tail, totals = make_tail(confirmed)
    tail.add(ProposedTokens(1, 3, 3, [5, 6, 7]))
    assert tail.settled and not tail.exhausted
    confirmed.append(5)
    tail.advance(0, 1)
    assert not tail.settled
    tail.add(ProposedTokens(1, 4, 6, [8]))
    assert tail.settled and not tail.needs_resync
    confirmed.append(6)
    tail.advance(0, 1)
    tail.add(ProposedTokens(1, 5, 7, []))
    assert tail.settled and not tail.exhausted and not tail.needs_resync
    assert totals.unused == {Unused.MALFORMED: 4}
    tail.add(proposed(7, 9, seen=5))
    assert tail.needs_resync


def test_nothing_is_waited_for_behind_a_draft_without_its_distribution() -> None:
    """The rest of the round will not come; a better proposal is used all the same."""
    tail, _ = make_tail([0, 1, 2])
    tail.add(ProposedTokens(1, 3, 3, [5, 6], [probs_for(5), None]))
    assert tail.tokens == [5] and tail.settled
    tail.add(proposed(4, 6, 7))
    assert tail.tokens == [5, 6, 7] and not tail.settled


def test_any_history_keeps_them_together() -> None:
    """Random proposals, rounds, restarts and ends: one distribution a token, its own."""
    rng = random.Random(1)
    for _ in range(200):
        confirmed = [0, 1, 2]
        tail, totals = make_tail(confirmed)
        drafted = 0
        for _ in range(30):
            action = rng.random()
            if action < 0.6:
                start = len(confirmed) + rng.randrange(-2, len(tail.tokens) + 2)
                tokens = [rng.randrange(4) for _ in range(rng.randrange(4))]
                proposal = proposed(start, *tokens, seen=min(start, len(confirmed)))
                probs = proposal.probs[: rng.randrange(1, 9)]
                tail.add(ProposedTokens(tail.epoch, proposal.seen_len, start, tokens, probs))
            elif action < 0.9:
                k = rng.randrange(len(tail.tokens) + 1)
                tail.begin_round(k)
                stood = rng.randrange(k + 1)
                # A draft that was rejected never comes instead of itself.
                last = (tail.tokens[stood] + 1) % 4 if stood < k else rng.randrange(4)
                new = [*tail.tokens[:stood], last]
                confirmed.extend(new)
                drafted += k
                tail.advance(k, len(new))
            elif action < 0.95:
                tail.restart(Unused.LOST)
            else:
                tail.discard(Unused.LOST, keep=1)
            assert [probs_for(token) for token in tail.tokens] == tail.probs
        tail.finish()
        assert tail.probs == []
        assert totals.num_proposed == drafted + sum(totals.unused.values())


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        pytest.param([], [], id="empty"),
        pytest.param([1, 2], [1.0], id="lengths"),
        pytest.param([1], [0.9], id="sum"),
        pytest.param([1, 2], [1.5, -0.5], id="negative"),
        pytest.param([1, 1], [0.5, 0.5], id="twice"),
        pytest.param([1, 2], [float("nan"), 1.0], id="not a number"),
        pytest.param([1, 2], [float("inf"), 0.0], id="infinite"),
        pytest.param(range(65), [1 / 65] * 65, id="too many"),
    ],
)
def test_what_is_no_distribution_is_none(ids: list[int], probs: list[float]) -> None:
    """Checked where it comes in, so that no step meets it."""
    assert sparse_probs_from_proto(draft_pb2.SparseProbs(ids=ids, probs=probs)) is None


def test_a_distribution_comes_through_as_it_was_sent() -> None:
    """The float32 values, and room for rounding in their sum."""
    sent = draft_pb2.SparseProbs(ids=[7, 3], probs=[0.1, 0.9004])
    assert sparse_probs_from_proto(sent) == SparseProbs((7, 3), tuple(sent.probs))
