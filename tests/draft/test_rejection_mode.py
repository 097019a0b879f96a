"""What the draft service says to a target that checks by rejection."""

from __future__ import annotations

from draft_service.book import Capacity, SessionBook
from draft_service.record import SequenceRecords
from draft_service.sessions import Opening, Session, Update
from draft_service.wire import next_frame
from outrider.engine.sparse_probs import MAX_SPARSE_ENTRIES, SparseProbs
from outrider.params import VerificationMode
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import sampling_pb2
from tests.support.draft_stream import (
    Follower,
    make_hello,
    make_open,
    open_stream,
    run_draft_service,
)

REJECTION = VerificationMode.REJECTION
FULL = SparseProbs(
    tuple(range(2**30, 2**30 + MAX_SPARSE_ENTRIES)), (1 / MAX_SPARSE_ENTRIES,) * MAX_SPARSE_ENTRIES
)


def opened(book: SessionBook, sequence_id: int, window: int) -> Session:
    """A sequence of two tokens in rejection mode."""
    opening = Opening(2, 4096, verification=REJECTION)
    session = book.apply(Update(sequence_id, 1, 1, 0, [1, 2], window, opening=opening))
    assert session is not None
    return session


def make_book() -> SessionBook:
    """An empty stream."""
    capacity = Capacity(100, 4096, 2**20)
    return SessionBook(capacity, lambda _: None, lambda _: None, SequenceRecords().begin)


def test_frames_keep_to_their_size_with_full_distributions() -> None:
    """However much there is to say, and it all arrives, in order and once."""
    book = make_book()
    for sequence_id in range(1, 9):
        session = opened(book, sequence_id, 200)
        session.extend([2**30] * 200, [-1.0] * 200, 0.0, [FULL] * 200)
        book.mark(session)
    told = dict.fromkeys(range(1, 9), 0)
    for max_bytes in [4096] * 5 + [65536] * 100:
        frame = next_frame(book, max_bytes, 0.0)
        assert frame.ByteSize() <= max_bytes
        for proposal in frame.proposals:
            assert proposal.start == 2 + told[proposal.sequence_id]
            assert len(proposal.sparse_probs) == len(proposal.tokens) > 0
            told[proposal.sequence_id] += len(proposal.tokens)
    assert set(told.values()) == {200}
    assert not book.has_something_to_say


def test_distributions_follow_their_tokens_through_an_update() -> None:
    """What is confirmed is cut from both; a difference drops both."""
    book = make_book()
    session = opened(book, 1, 4)
    marked = [SparseProbs((token,), (1.0,)) for token in (5, 6, 7)]
    session.extend([5, 6, 7], probs=marked)
    session.apply(Update(1, 1, 2, 2, [5], 4))
    unsent = session.take_unsent()
    assert unsent is not None
    assert (unsent.tokens, unsent.probs) == ([6, 7], marked[1:])
    session.apply(Update(1, 1, 3, 3, [9], 4))
    session.extend([8], probs=[FULL])
    unsent = session.take_unsent()
    assert unsent is not None
    assert (unsent.tokens, unsent.probs) == ([8], [FULL])


async def test_ngram_lookup_is_certain() -> None:
    """It always says the same, so each token has probability 1; and nobody else is told."""
    prompt = [5, 6, 7, 8, 5, 6]
    async with (
        run_draft_service(DraftSettings(port=0)) as draft,
        open_stream(draft.address, make_hello()) as stream,
    ):
        opening = make_open(len(prompt))
        opening.verification = sampling_pb2.SpeculationParams.VERIFICATION_REJECTION
        for sequence_id, settings in ((1, opening), (2, make_open(len(prompt)))):
            follower = Follower(stream, sequence_id, settings)
            await follower.open(prompt, window=3)
            assert await follower.collect(3) == [7, 8, 5]
        by_id = {1: [], 2: []}
        for frame in stream.frames:
            for proposal in frame.proposals:
                by_id[proposal.sequence_id] += proposal.sparse_probs
    assert [(list(p.ids), list(p.probs)) for p in by_id[1]] == [([t], [1.0]) for t in (7, 8, 5)]
    assert by_id[2] == []
