"""The rules by which a proposal is aligned with what is confirmed, one by one."""

from __future__ import annotations

import weakref

import pytest

from target_service.draft_tail import (
    Arrival,
    DraftTail,
    DraftTotals,
    ProposedTokens,
    Unused,
)

VOCAB = 100
MAX_TAIL = 6


def make_tail(confirmed: list[int], tail: list[int] | None = None) -> tuple[DraftTail, DraftTotals]:
    """A tail behind `confirmed`, filled by one proposal."""
    totals = DraftTotals()
    made = DraftTail(confirmed, VOCAB, MAX_TAIL, totals)
    if tail:
        made.add(ProposedTokens(1, len(confirmed), len(confirmed), tail))
    return made, totals


def round_of(tail: DraftTail, confirmed: list[int], num_drafted: int, new: list[int]) -> None:
    """Verify `num_drafted` drafts and confirm `new`."""
    tail.begin_round(num_drafted)
    confirmed.extend(new)
    tail.advance(num_drafted, len(new))


@pytest.mark.parametrize(
    ("start", "tokens", "tail", "unused"),
    [
        pytest.param(5, [7], [5, 6, 7], {}, id="appended"),
        pytest.param(3, [5, 6, 7], [5, 6, 7], {Unused.DUPLICATE: 2}, id="overlap trimmed"),
        pytest.param(4, [6], [5, 6], {Unused.DUPLICATE: 1}, id="nothing new"),
        pytest.param(4, [9, 8], [5, 9, 8], {Unused.REPLACED: 1}, id="replaced from a difference"),
        pytest.param(3, [9], [9], {Unused.REPLACED: 2}, id="replaced by something shorter"),
        pytest.param(2, [2, 5, 6, 7], [5, 6, 7], {Unused.LATE: 1, Unused.DUPLICATE: 2}, id="late"),
        pytest.param(1, [1, 2], [5, 6], {Unused.LATE: 2}, id="all of it late"),
        pytest.param(2, [3, 5, 6], [], {Unused.MISMATCH: 5}, id="contradicts what is confirmed"),
        pytest.param(5, [7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10], {Unused.WINDOW: 1}, id="too many"),
        pytest.param(6, [7], [5, 6], {Unused.GAP: 1}, id="gap"),
        pytest.param(5, [VOCAB], [5, 6], {Unused.MALFORMED: 1}, id="no such token"),
        pytest.param(5, [], [5, 6], {}, id="empty"),
    ],
)
def test_a_proposal_is_aligned_by_position(start, tokens, tail, unused):
    """Equal tokens are trimmed, a different one replaces the tail from there, gaps are refused."""
    made, totals = make_tail([0, 1, 2], [5, 6])
    made.add(ProposedTokens(1, min(start, 3), start, tokens))
    assert made.tokens == tail
    assert dict(totals.unused) == unused == dict(made.unused)
    assert made.needs_resync == (Unused.GAP in unused)
    assert totals.num_proposed == 2 + len(tokens)


@pytest.mark.parametrize(
    ("epoch", "seen_len", "start", "arrival"),
    [
        pytest.param(2, 3, 5, Arrival.STALE, id="another epoch"),
        pytest.param(2, 99, 0, Arrival.STALE, id="another epoch comes before malformed"),
        pytest.param(1, 4, 5, Arrival.MALFORMED, id="has seen more than was confirmed"),
        pytest.param(1, 3, 2, Arrival.MALFORMED, id="starts before what it has seen"),
        pytest.param(1, 3, 9, Arrival.GAP, id="gap"),
    ],
)
def test_refused_proposals_leave_the_tail_alone(epoch, seen_len, start, arrival):
    """They are counted under their reason, and the tail stays."""
    made, totals = make_tail([0, 1, 2], [5, 6])
    made.add(ProposedTokens(epoch, seen_len, start, [7]))
    assert made.tokens == [5, 6]
    assert totals.arrivals == {Arrival.USED: 1, arrival: 1}


def test_a_difference_found_by_verification_makes_older_drafts_stale():
    """Drafted without knowing the recovered token: stale; with it: used."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5, 6])
    round_of(made, confirmed, 2, [5, 9])
    assert made.tokens == []
    made.add(ProposedTokens(1, 3, 5, [7]))
    made.add(ProposedTokens(1, 4, 5, [7]))
    assert (made.tokens, made.needs_resync) == ([], False)
    assert totals.arrivals[Arrival.STALE] == 2
    made.add(ProposedTokens(1, 5, 5, [8]))
    assert made.tokens == [8]


def test_a_difference_found_on_arrival_makes_older_drafts_stale():
    """The tail was empty when the target went its own way; what was under way is stale."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed)
    round_of(made, confirmed, 0, [9])
    made.add(ProposedTokens(1, 3, 3, [5, 6]))
    made.add(ProposedTokens(1, 3, 5, [7]))
    assert (made.tokens, made.needs_resync) == ([], False)
    assert totals.unused == {Unused.MISMATCH: 2, Unused.STALE: 1}
    made.add(ProposedTokens(1, 4, 4, [8]))
    assert made.tokens == [8]


def test_a_difference_from_the_tail_alone_makes_nothing_stale():
    """Nobody knows yet who is right, so the drafter's next word counts whatever it had seen."""
    made, _ = make_tail([0, 1, 2], [5, 6])
    made.add(ProposedTokens(1, 3, 4, [9]))
    made.add(ProposedTokens(1, 2, 5, [8]))
    assert made.tokens == [5, 9, 8]


def test_the_bonus_token_trims_or_drops_the_rest_of_the_tail():
    """All verified drafts stood; the draft behind them was foretold or was wrong."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5, 6, 7, 8])
    round_of(made, confirmed, 1, [5, 6])
    assert (made.tokens, totals.unused) == ([7, 8], {Unused.TRIMMED: 1})
    round_of(made, confirmed, 1, [7, 9])
    assert (made.tokens, totals.unused) == ([], {Unused.TRIMMED: 1, Unused.MISMATCH: 1})


def test_what_arrives_during_a_round_waits_for_its_end():
    """It is aligned with what the round confirmed, in the order in which it came."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5])
    made.begin_round(1)
    made.add(ProposedTokens(1, 3, 4, [6]))
    made.add(ProposedTokens(1, 3, 5, [7, 8]))
    assert (made.tokens, made.num_open) == ([5], 4)
    confirmed.extend([5, 6])
    made.advance(1, 2)
    assert (made.tokens, made.num_open) == ([7, 8], 2)
    assert totals.unused == {Unused.LATE: 1}


def test_what_waits_keeps_only_its_tokens():
    """Not the message that they came in, which may be much larger."""

    class Message(list):
        """Can be referred to weakly."""

    tail, _ = make_tail([1, 2])
    tail.begin_round(0)
    message = Message([3, 4])
    tail.add(ProposedTokens(1, 2, 2, message))
    gone = weakref.ref(message)
    del message
    assert gone() is None
    tail.advance(0, 0)
    assert tail.tokens == [3, 4]


def test_a_flood_during_a_round_is_refused():
    """Memory stays bounded however much a drafter sends while one step runs."""
    confirmed = [0]
    made, totals = make_tail(confirmed)
    made.begin_round(0)
    for _ in range(1000):
        made.add(ProposedTokens(1, 1, 1, [5]))
    assert totals.arrivals[Arrival.FLOOD] == 1000 - made.num_open
    assert made.num_open < 100
    confirmed.append(5)
    made.advance(0, 1)
    assert totals.num_proposed == sum(totals.unused.values()) == 1000


def test_a_new_epoch_refuses_the_old_and_forgets_its_differences():
    """After `restart` only the new epoch counts, from whatever length it has seen."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5])
    round_of(made, confirmed, 1, [9])
    made.add(ProposedTokens(1, 4, 6, [7]))
    assert made.needs_resync
    made.restart(Unused.GAP)
    assert (made.epoch, made.needs_resync) == (2, False)
    made.add(ProposedTokens(1, 4, 4, [7]))
    made.add(ProposedTokens(2, 2, 4, [8]))
    assert made.tokens == [8]
    assert totals.unused == {Unused.GAP: 1, Unused.STALE: 1}


@pytest.mark.parametrize("new", [[5, 6, 9], [9]], ids=["accepted", "rejected"])
def test_drafts_in_verification_outlive_their_drafter(new):
    """A drafter lost during a round: what is verified is drafted, and nothing is counted twice.

    The next drafter starts afresh: what the old one had guessed wrong makes nothing of it stale.
    """
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5, 6, 7])
    made.begin_round(2)
    made.restart(Unused.LOST)
    made.add(ProposedTokens(2, 3, 3, [new[0], 8]))
    confirmed.extend(new)
    made.advance(2, len(new))
    assert totals.num_proposed == 2 + sum(totals.unused.values()) + made.num_open
    assert totals.unused[Unused.LOST] == 1
    assert made.tokens == ([8] if len(new) == 1 else [])
    made.finish()
    assert totals.num_proposed == 2 + sum(totals.unused.values())


def test_a_refusal_during_a_round_keeps_what_is_verified():
    """`discard` takes only what no step has in hand."""
    confirmed = [0, 1, 2]
    made, totals = make_tail(confirmed, [5, 6, 7])
    made.begin_round(2)
    made.discard(Unused.LOST)
    assert made.tokens == [5, 6]
    confirmed.extend([5, 6, 9])
    made.advance(2, 3)
    assert (made.tokens, totals.unused) == ([], {Unused.LOST: 1})


def test_exhausted_while_the_drafter_has_nothing_behind_the_tail():
    """An empty proposal says not to wait, until the end of the tail moves."""
    confirmed = [0, 1, 2]
    made, _ = make_tail(confirmed, [5])
    assert not made.exhausted
    made.add(ProposedTokens(1, 3, 4, []))
    assert made.exhausted
    round_of(made, confirmed, 1, [5, 9])
    assert not made.exhausted
    made.add(ProposedTokens(1, 3, 4, []))
    assert not made.exhausted  # said before it knew the last token
    made.add(ProposedTokens(1, 5, 5, []))
    assert made.exhausted


def test_what_was_said_of_another_text_does_not_end_a_wait():
    """Nothing behind 5 and 6; but the target went on with 5 and 9, where there may be more."""
    confirmed = [0, 1, 2]
    made, _ = make_tail(confirmed, [5, 6])
    made.add(ProposedTokens(1, 3, 5, []))
    assert made.exhausted
    round_of(made, confirmed, 2, [5, 9])
    assert made.end == 5
    assert not made.settled


@pytest.mark.parametrize("late_by", [0, 1, 4])
def test_an_empty_answer_is_one_however_late_it_comes(late_by):
    """It says that no drafts were lost; whether a step may go on is another question."""
    made, _ = make_tail([0] * (3 + late_by))
    assert not made.take_empty()
    made.add(ProposedTokens(1, 3, 3, []))
    assert made.take_empty()
    assert not made.take_empty()
    assert made.exhausted == (late_by == 0)


def test_an_empty_answer_during_a_round_belongs_to_that_round():
    """As soon as the round is over it can be asked for."""
    confirmed = [0, 1, 2]
    made, _ = make_tail(confirmed)
    made.begin_round(0)
    made.add(ProposedTokens(1, 3, 3, []))
    assert not made.take_empty()
    confirmed.append(7)
    made.advance(0, 1)
    assert made.take_empty()


@pytest.mark.parametrize(
    "proposal",
    [
        pytest.param(ProposedTokens(1, 2, 2, [2]), id="late drafts"),
        pytest.param(ProposedTokens(1, 2, 3, []), id="nothing behind drafts that came late"),
        pytest.param(ProposedTokens(1, 3, 3, [VOCAB]), id="malformed"),
        pytest.param(ProposedTokens(1, 4, 4, []), id="behind what nobody has confirmed"),
        pytest.param(ProposedTokens(2, 3, 3, []), id="another epoch"),
    ],
)
def test_what_is_no_honest_empty_answer(proposal):
    """Drafts that were lost are not made good by having nothing behind them."""
    made, _ = make_tail([0, 1, 2])
    made.add(proposal)
    assert not made.take_empty()


def test_finish_counts_everything_that_is_left():
    """The tail, what is verified now and what is held back: all of it was in vain."""
    made, totals = make_tail([0, 1, 2], [5, 6, 7])
    made.begin_round(2)
    made.restart(Unused.LOST)
    made.add(ProposedTokens(2, 3, 3, [5]))
    made.finish()
    assert made.num_open == 0
    assert totals.unused == {Unused.LOST: 1, Unused.FINISHED: 3}
