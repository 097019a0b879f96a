"""The state of one sequence, against a model that recomputes everything from the history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.sessions import Gap, Opening, Session, Update

STOP = 9


def update(base_len: int, tokens: list[int], window: int = 4, update_seq: int = 1) -> Update:
    """An update of the one sequence of these tests."""
    return Update(1, 1, update_seq, base_len, tokens, window)


def session(max_len: int = 1000, **facts: object) -> Session:
    """A sequence without tokens."""
    return Session(1, 1, Opening(prompt_len=0, max_len=max_len, **facts))


def test_the_agreeing_part_of_the_tail_is_kept() -> None:
    """Confirming what was drafted keeps the rest; another token drops it from there."""
    s = session()
    s.apply(update(0, [1, 2]))
    s.extend([3, 4, 5, 6])
    s.apply(update(2, [3]))
    assert (s.token_ids, s.confirmed_len, s.room) == ([1, 2, 3, 4, 5, 6], 3, 1)
    s.apply(update(3, [4, 8, 7]))
    assert (s.token_ids, s.confirmed_len, s.room) == ([1, 2, 3, 4, 8, 7], 6, 4)


def test_stable_len_tells_from_where_tokens_have_changed() -> None:
    """What was computed for tokens before it may be kept."""
    s = session()
    s.apply(update(0, [1, 2]))
    s.extend([3, 4, 5])
    assert s.settle() == 0
    s.apply(update(2, [3]))
    assert s.stable_len == 5
    s.apply(update(3, [7, 8]))
    assert s.settle() == 3
    assert s.stable_len == 5


def test_a_gap_changes_nothing() -> None:
    """A refused update leaves the sequence as it was."""
    s = session()
    s.apply(update(0, [1, 2]))
    for base_len in (0, 1, 3):
        with pytest.raises(Gap):
            s.apply(update(base_len, [5], window=9))
    assert (s.token_ids, s.confirmed_len, s.window) == ([1, 2], 2, 4)


def test_it_does_not_draft_past_a_stop_but_goes_on_if_the_target_does() -> None:
    """A stop in the tail ends it; a confirmed one does not."""
    s = session(stop_token_ids=frozenset({STOP}))
    s.apply(update(0, [1]))
    assert s.extend([2, STOP, 3]) == 2
    assert s.stuck
    assert s.take_unsent().tokens == [2, STOP]
    assert s.take_unsent().tokens == [], "the target need not wait for more"
    assert s.take_unsent() is None
    s.apply(update(1, [2, STOP]))
    assert s.wants_tokens


def test_a_stop_before_min_tokens_is_not_proposed() -> None:
    """The target would not choose it there."""
    s = Session(1, 1, Opening(2, 100, min_tokens=3, stop_token_ids=frozenset({STOP})))
    s.apply(update(0, [1, 2], window=8))
    assert s.extend([5, 6, STOP]) == 2
    assert s.dry
    s.apply(update(2, [5, 6, 7], window=8))
    assert s.extend([STOP, 1]) == 1


def test_ids_outside_the_targets_vocabulary_are_not_proposed() -> None:
    """The tail ends before such an id."""
    s = session(vocab_size=50)
    s.apply(update(0, [1]))
    assert s.extend([49, 50, 3]) == 1
    assert s.dry


def test_max_len_bounds_the_tail() -> None:
    """Nothing is drafted at or behind max_len, and the target is told so."""
    s = session(max_len=4)
    s.apply(update(0, [1, 2], window=8))
    assert s.extend([3, 4, 5, 6]) == 2
    assert s.take_unsent().tokens == [3, 4]
    assert s.take_unsent().tokens == []


def test_window_zero_asks_for_nothing() -> None:
    """It gets ids and stays quiet; the next window starts drafting."""
    s = session()
    s.apply(update(0, [1, 2], window=0))
    assert not s.wants_tokens
    assert s.take_unsent() is None
    s.apply(update(2, [3], window=2))
    assert s.wants_tokens


def test_a_smaller_window_holds_back_what_was_not_sent() -> None:
    """Tokens drafted under a larger window are sent when it opens again."""
    s = session()
    s.apply(update(0, [1], window=4))
    s.extend([2, 3, 4, 5])
    s.apply(update(1, [], window=1))
    assert s.take_unsent().tokens == [2]
    assert not s.has_unsent
    s.apply(update(1, [], window=3))
    assert s.take_unsent().tokens == [3, 4]


def test_a_closed_sequence_has_nothing_to_say() -> None:
    """Proposals of finished sequences are dropped."""
    s = session()
    s.apply(update(0, [1]))
    s.extend([2])
    s.closed = True
    assert s.take_unsent() is None
    assert not s.wants_tokens


def test_logprobs_and_time_go_with_their_tokens() -> None:
    """A dropped tail takes its numbers along; split sends do not mix them up."""
    s = session()
    s.apply(update(0, [1], window=4))
    s.extend([2, 3, 4], [-2.0, -3.0, -4.0], compute_s=1.0)
    s.apply(update(1, [2], window=4))
    first = s.take_unsent(max_tokens=1)
    assert (first.start, first.tokens, first.logprobs) == (2, [3], [-3.0])
    assert first.compute_s == 1.0
    s.apply(update(2, [7], window=4))
    s.extend([8], [-8.0], compute_s=0.5)
    second = s.take_unsent()
    assert (second.start, second.tokens, second.logprobs) == (3, [8], [-8.0])
    assert second.compute_s == 0.5


class TargetTail:
    """The target's end, by the rules of the protocol and nothing else: what has it been sent?"""

    def __init__(self) -> None:
        self.confirmed: list[int] = []
        self.tail: list[int] = []

    def confirm(self, tokens: list[int]) -> None:
        """Drop the tail at the first difference."""
        self.confirmed += tokens
        agrees = self.tail[: len(tokens)] == tokens[: len(self.tail)]
        self.tail = self.tail[len(tokens) :] if agrees else []


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5)
draft = st.tuples(st.just("draft"), tokens)
confirm = st.tuples(st.just("confirm"), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=3))
send = st.tuples(st.just("send"), st.integers(1, 6))
other = st.one_of(
    st.tuples(st.just("window"), st.integers(0, 6)),
    st.tuples(st.just("settle")),
    st.tuples(st.just("gap"), st.integers(1, 3)),
)
# Whole rounds are drawn as such, as single events would seldom make one.
rounds = st.tuples(draft, send, confirm)
histories = st.lists(
    st.one_of(rounds, st.one_of(draft, confirm, send, other).map(lambda event: (event,))),
    max_size=20,
).map(lambda groups: [event for group in groups for event in group])


@settings(max_examples=300, deadline=None)
@given(histories, st.integers(5, 40))
def test_every_history_agrees_with_the_plain_rules(history: list[tuple], max_len: int) -> None:
    """After any mix of drafts, confirmations, windows and sends:

    confirmed tokens are the target's; each token is sent once, without gaps, never beyond the
    window or max_len; and what the target holds is a part of the drafter's tail.
    """
    s = session(max_len=max_len)
    target = TargetTail()
    window, settled = 4, list(s.token_ids)
    s.apply(update(0, [], window))
    for kind, *args in history:
        if kind == "draft":
            before, room = list(s.token_ids), s.room
            kept = s.extend(args[0])
            assert kept == min(len(args[0]), room)
            assert s.token_ids == before + args[0][:kept]
        elif kind == "confirm":
            follow, other = args
            tokens = s.token_ids[s.confirmed_len : s.confirmed_len + follow] + other
            s.apply(update(len(target.confirmed), tokens, window))
            target.confirm(tokens)
        elif kind == "window":
            window = args[0]
            s.apply(update(len(target.confirmed), [], window))
        elif kind == "gap":
            with pytest.raises(Gap):
                s.apply(update(len(target.confirmed) + args[0], [0], window))
        elif kind == "settle":
            stable = s.settle()
            assert s.token_ids[:stable] == settled[:stable]
            settled = list(s.token_ids)
        elif kind == "send":
            expected = s.has_unsent
            unsent = s.take_unsent(args[0])
            assert (unsent is not None) == expected
            if unsent is not None:
                assert unsent.start == len(target.confirmed) + len(target.tail)
                assert len(unsent.tokens) <= args[0]
                end = unsent.start + len(unsent.tokens)
                if unsent.tokens:
                    assert end <= min(len(target.confirmed) + window, max_len)
                target.tail += unsent.tokens
        assert s.token_ids[: s.confirmed_len] == target.confirmed
        tail = s.token_ids[s.confirmed_len :]
        assert tail[: len(target.tail)] == target.tail
