"""What a stream may hold and say is bounded, and what it gives back is what it took."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.book import Capacity, Gone, GoneReason, SessionBook
from draft_service.record import SequenceRecords
from draft_service.sessions import Opening, Session, Update

OPENING = Opening(prompt_len=1, max_len=1000)


class Fixture:
    """Books that share a capacity, and the sessions that a proposer would know of."""

    def __init__(self, capacity: Capacity, num_books: int = 1) -> None:
        self.capacity = capacity
        self.known: set[Session] = set()
        self.records = SequenceRecords()
        self.books = [
            SessionBook(capacity, self.known.add, self.known.remove, self.records.begin)
            for _ in range(num_books)
        ]


def opening(sequence_id: int, epoch: int = 1, tokens: tuple[int, ...] = (1,)) -> Update:
    """The first update of an epoch."""
    return Update(sequence_id, epoch, 1, 0, tokens, 4, opening=OPENING)


def all_gone(book: SessionBook) -> list[Gone]:
    """Everything that waits to be said."""
    said = []
    while (gone := book.next_gone()) is not None:
        said.append(gone)
    return said


def test_places_are_shared_by_all_streams() -> None:
    """A sequence too many is FULL, told once an epoch; the end of another makes room."""
    fixture = Fixture(Capacity(2, 100, 1000), num_books=2)
    one, two = fixture.books
    assert one.apply(opening(1)) and two.apply(opening(1))
    assert two.apply(opening(2)) is None
    assert two.apply(opening(2)) is None
    assert all_gone(two) == [Gone(2, 1, GoneReason.FULL)]
    one.close()
    assert two.apply(opening(2, epoch=2))
    assert fixture.capacity.num_sequences == len(fixture.known) == 2


def test_tokens_of_all_sequences_together_are_bounded() -> None:
    """The sequence that would exceed the total is FULL and gives back what it had."""
    fixture = Fixture(Capacity(10, 100, 50))
    (book,) = fixture.books
    book.apply(opening(1, tokens=(5,) * 30))
    assert book.apply(opening(2, tokens=(5,) * 15))
    assert book.apply(Update(2, 1, 2, 15, (5,) * 10, 4)) is None
    assert all_gone(book) == [Gone(2, 1, GoneReason.FULL)]
    assert fixture.capacity.num_tokens == 30


def test_what_is_refused_is_remembered_in_bounds() -> None:
    """A target that names sequences for ever and reads nothing costs no more memory."""
    (book,) = Fixture(Capacity(2, 100, 1000)).books
    for sequence_id in range(1000):
        book.apply(Update(sequence_id, 1, 1, 5, (1,), 4))
    said = all_gone(book)
    assert len(said) == 8
    assert said[-1] == Gone(999, 1, GoneReason.UNKNOWN)


def test_sequences_take_turns() -> None:
    """One with much to say does not keep the others waiting."""
    (book,) = Fixture(Capacity(10, 1000, 1000)).books
    for sequence_id in (1, 2):
        session = book.apply(Update(sequence_id, 1, 1, 0, (1,), 100, opening=OPENING))
        session.extend([7] * 20)
        book.mark(session)
    turns = [book.next_unsent(8) for _ in range(6)]
    assert [session.sequence_id for session, _ in turns] == [1, 2, 1, 2, 1, 2]
    assert [len(unsent.tokens) for _, unsent in turns] == [8, 8, 8, 8, 4, 4]


updates = st.builds(
    Update,
    sequence_id=st.integers(1, 4),
    epoch=st.integers(1, 3),
    update_seq=st.just(1),
    base_len=st.integers(0, 3),
    tokens=st.lists(st.integers(0, 3), max_size=3),
    window=st.integers(0, 3),
    finished=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), updates, st.booleans()), max_size=40))
def test_whatever_comes_the_counts_balance(events: list[tuple[int, Update, bool]]) -> None:
    """Sequences and tokens held equal those of the open sessions, and end at zero."""
    fixture = Fixture(Capacity(3, 6, 12), num_books=2)
    for which, update, first in events:
        book = fixture.books[which]
        known = any(s.sequence_id == update.sequence_id for s in fixture.known)
        if first and not known:
            update = Update(
                update.sequence_id, update.epoch, 1, 0, update.tokens, update.window,
                opening=OPENING,
            )  # fmt: skip
        book.apply(update)
        capacity = fixture.capacity
        assert capacity.num_sequences == len(fixture.known) == sum(map(len, fixture.books)) <= 3
        assert capacity.num_tokens == sum(each.confirmed_len for each in fixture.known) <= 12
        assert not any(each.closed for each in fixture.known)
    for book in fixture.books:
        book.close()
        book.close()
    assert (fixture.capacity.num_sequences, fixture.capacity.num_tokens) == (0, 0)
    assert not fixture.known
