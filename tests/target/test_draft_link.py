"""What a drafter is told: computed when it is written, exact whatever the schedule."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.params import SamplingParams, VerificationMode
from target_service.draft_link import MAX_UPDATE_TOKENS, SequenceFacts, SequenceLink, Update
from target_service.draft_tail import DraftTail, DraftTotals, Unused
from tests.support.honest_drafter import HonestDrafter

FACTS = SequenceFacts(3, 100, SamplingParams(), b"", VerificationMode.EXACT_MATCH, 0, ())


def make_link(confirmed: list[int]) -> SequenceLink:
    """A sequence that its drafter has not heard of."""
    return SequenceLink(7, confirmed, DraftTail(confirmed, 2**31, 16, DraftTotals()), FACTS)


def write_all(link: SequenceLink, max_tokens: int = MAX_UPDATE_TOKENS) -> list[Update]:
    """Every update that is due."""
    updates = []
    while link.needs_update and len(updates) < 100:
        updates.append(link.next_update(0.0, max_tokens))
    assert not link.needs_update
    return updates


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("grow"), st.integers(1, 5)),
            st.tuples(st.just("window"), st.integers(0, 8)),
            st.tuples(st.just("write"), st.integers(1, 6)),
            st.tuples(st.just("resync"), st.just(0)),
        ),
        min_size=10,
        max_size=60,
    ),
    prompt_len=st.integers(1, 20),
)
@settings(max_examples=100, deadline=None)
def test_updates_add_up_to_the_confirmed_tokens(events, prompt_len):
    """Whenever and however much is written: the drafter ends with exactly what is confirmed.

    Each epoch starts with the settings and base_len 0, each update continues the one before, and
    there is a window only where nothing is missing.
    """
    confirmed = list(range(prompt_len))
    link = make_link(confirmed)
    drafter = HonestDrafter(lambda prefix: None)
    for action, amount in events:
        if action == "grow":
            confirmed.extend(range(len(confirmed), len(confirmed) + amount))
        elif action == "window":
            link.window = amount
        elif action == "resync":
            link.resync(Unused.GAP)
        elif link.needs_update:
            update = link.next_update(0.0, amount)
            assert len(update.tokens) <= amount
            drafter.apply(update)
            complete = drafter.confirmed == confirmed
            assert update.window == (link.window if complete else 0)
    for update in write_all(link):
        drafter.apply(update)
    assert drafter.confirmed == confirmed
    assert (drafter.window, drafter.epoch) == (link.window, link.tail.epoch)


def test_a_long_prefix_continues_in_further_updates():
    """No update is longer than the limit, and drafting starts with the last one."""
    confirmed = list(range(2 * MAX_UPDATE_TOKENS + 5))
    link = make_link(confirmed)
    link.window = 4
    updates = write_all(link)
    assert [len(u.tokens) for u in updates] == [MAX_UPDATE_TOKENS, MAX_UPDATE_TOKENS, 5]
    assert [u.base_len for u in updates] == [0, MAX_UPDATE_TOKENS, 2 * MAX_UPDATE_TOKENS]
    assert [u.window for u in updates] == [0, 0, 4]
    assert [u.update_seq for u in updates] == [1, 2, 3]
    assert [u.facts is not None for u in updates] == [True, False, False]
    assert sum((u.tokens for u in updates), []) == confirmed


def test_many_steps_become_one_update():
    """A drafter that reads slowly finds one update behind the last, not a backlog."""
    confirmed = [1, 2]
    link = make_link(confirmed)
    write_all(link)
    for token in range(50):
        confirmed.append(token)
    assert [u.tokens for u in write_all(link)] == [list(range(50))]


def test_a_window_alone_is_an_update():
    """Closing or opening the window is told without any tokens."""
    link = make_link([1, 2])
    link.window = 4
    write_all(link)
    link.window = 0
    (update,) = write_all(link)
    assert (update.tokens, update.base_len, update.window) == ([], 2, 0)


def test_finished_is_told_once_and_only_where_it_was_opened():
    """A drafter that never heard of a sequence is not told that it ended."""
    unheard = make_link([1, 2])
    unheard.finished = True
    assert not unheard.needs_update
    confirmed = [1, 2]
    link = make_link(confirmed)
    link.window = 4
    write_all(link)
    confirmed.append(3)
    link.resync(Unused.GAP)
    link.finished = True
    update = link.next_update(0.0)
    assert update == Update(7, 1, 2, 2, [], 0, True, None)


def test_a_refused_sequence_needs_nothing_more():
    """The drafter does not hold it, so neither tokens nor its end are told."""
    confirmed = [1, 2]
    link = make_link(confirmed)
    write_all(link)
    link.refused = True
    confirmed.append(3)
    assert not link.needs_update
    link.finished = True
    assert not link.needs_update


def test_round_trips_are_measured_once_an_update():
    """The first answer to an update tells the time; what is remembered is bounded."""
    confirmed = [1]
    link = make_link(confirmed)
    for now in range(1000):
        confirmed.append(1)
        link.next_update(float(now))
    assert link.take_sent_at(1000) == 999.0
    assert link.take_sent_at(1000) is None
    assert link.take_sent_at(1) is None
    assert len(link._sent_at) < 100
