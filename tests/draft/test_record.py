"""One record a sequence, however it ends: its log line, its span, and the counts over all."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from draft_service.book import Capacity, GoneReason, SessionBook
from draft_service.record import End, SequenceRecords
from draft_service.sessions import Opening, Update
from tests.support.otlp import Spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Fixture:
    """A stream's book with room for two sequences of ten tokens, and where its records go."""

    def __init__(self) -> None:
        self.spans = Spans()
        self.records = SequenceRecords("ngram", self.spans.tracing("draft"))
        self.capacity = Capacity(2, 10, 20)
        self.book = SessionBook(self.capacity, lambda _: None, lambda _: None, self.records.begin)

    def open(self, sequence_id: int, epoch: int = 1, num_tokens: int = 3) -> None:
        """The first update of an epoch, of a traced request."""
        opening = Opening(prompt_len=2, max_len=100, traceparent=TRACEPARENT)
        tokens = [5] * num_tokens
        self.book.apply(Update(sequence_id, epoch, 1, 0, tokens, 4, opening=opening))

    def ended(self) -> dict[str, int]:
        """Sequences by how they ended, where there are any."""
        assert self.records.started == sum(self.records.ended.values()) + len(self.book)
        return {end.value: count for end, count in self.records.ended.items() if count}


def finish(fixture: Fixture) -> None:
    """The target says that it has ended."""
    fixture.book.apply(Update(1, 1, 2, 3, [], 0, finished=True))


def leave_a_gap(fixture: Fixture) -> None:
    """An update that does not follow."""
    fixture.book.apply(Update(1, 1, 2, 9, [5], 4))


def grow_too_long(fixture: Fixture) -> None:
    """More tokens than one sequence may have."""
    fixture.book.apply(Update(1, 1, 2, 3, [5] * 8, 4))


def fail(fixture: Fixture) -> None:
    """Steps fail with it."""
    fixture.book.drop(fixture.book._sessions[1])


def lose(fixture: Fixture) -> None:
    """Its stream ends."""
    fixture.book.close()


@pytest.mark.parametrize(
    ("end", "outcome", "status"),
    [
        (finish, "finished", "unset"),
        (leave_a_gap, "unknown", "unset"),
        (grow_too_long, "too_long", "unset"),
        (fail, "failed", "error"),
        (lose, "lost", "error"),
    ],
)
def test_every_end_is_told_once(end: Any, outcome: str, status: str) -> None:
    """By the log line, the span and the counts alike; what comes behind changes nothing."""
    fixture = Fixture()
    with capture_logs() as lines:
        fixture.open(1)
        end(fixture)
        finish(fixture)
        fixture.book.close()
    assert fixture.ended() == {outcome: 1}
    (line,) = lines
    (span,) = fixture.spans.all
    assert (line["event"], line["outcome"]) == ("sequence", outcome)
    assert (line["trace_id"], line["span_id"]) == (span.trace_id, span.span_id)
    assert span.attributes["outrider.outcome"] == outcome
    assert span.status == status
    assert ("error.type" in span.attributes) == (status == "error")
    assert fixture.capacity.num_sequences == 0


def test_a_sequence_too_many_is_told_too() -> None:
    """It was never open, and the trace says why there were no drafts."""
    fixture = Fixture()
    for sequence_id in (1, 2, 3):
        fixture.open(sequence_id)
    assert fixture.ended() == {"full": 1}
    (span,) = fixture.spans.all
    assert span.attributes["outrider.sequence_id"] == 3


def test_a_new_epoch_is_the_same_sequence() -> None:
    """One span over both, which counts how often its tokens came again."""
    fixture = Fixture()
    with capture_logs() as lines:
        fixture.open(1)
        fixture.open(1, epoch=2, num_tokens=4)
        fixture.open(1, epoch=3, num_tokens=5)
        assert fixture.ended() == {}
        fixture.book.apply(Update(1, 3, 2, 5, [], 0, finished=True))
    (span,) = fixture.spans.all
    assert (lines[0]["resyncs"], lines[0]["confirmed_len"], lines[0]["prompt_len"]) == (2, 5, 2)
    assert span.attributes["outrider.resyncs"] == 2
    assert fixture.ended() == {"finished": 1}


def test_one_that_was_gone_and_comes_back_is_another() -> None:
    """Its first span has ended and cannot go on."""
    fixture = Fixture()
    fixture.open(1)
    leave_a_gap(fixture)
    fixture.open(1, epoch=2)
    fixture.book.close()
    assert fixture.ended() == {"unknown": 1, "lost": 1}
    assert len(fixture.spans.all) == fixture.spans.num_started == 2


def test_what_was_never_opened_is_no_sequence() -> None:
    """An update for something unknown is answered and not counted."""
    fixture = Fixture()
    fixture.book.apply(Update(7, 1, 1, 5, [5], 4))
    assert fixture.book.next_gone().reason is GoneReason.UNKNOWN
    assert fixture.ended() == {} and fixture.records.started == 0


def test_proposed_tokens_are_those_that_left() -> None:
    """What was drafted and never sent is not proposed."""
    fixture = Fixture()
    with capture_logs() as lines:
        fixture.open(1)
        session = fixture.book._sessions[1]
        session.extend([7, 8, 9])
        fixture.book.mark(session)
        fixture.book.next_unsent(2)
        finish(fixture)
    assert fixture.records.proposed_tokens == lines[0]["proposed_tokens"] == 2
    assert fixture.spans.all[0].attributes["outrider.proposed_tokens"] == 2


def test_a_span_hangs_under_the_targets() -> None:
    """As its child, and linked to it."""
    fixture = Fixture()
    fixture.open(1)
    fixture.book.close()
    (span,) = fixture.spans.all
    assert (span.name, span.kind) == ("draft ngram", "internal")
    assert (span.trace_id, span.parent_span_id) == (TRACE, PARENT)
    assert span.links == [(TRACE, PARENT)]


@pytest.mark.parametrize("traceparent", ["", "nonsense", TRACEPARENT[:-2] + "00"])
def test_without_a_trace_there_is_no_span(traceparent: str) -> None:
    """A request that is not traced, or not sampled, gets no trace from its drafts."""
    spans = Spans()
    records = SequenceRecords("ngram", spans.tracing("draft"))
    records.begin(1, Opening(2, 100, traceparent=traceparent)).end(End.FINISHED)
    assert spans.num_started == 0
    assert records.ended[End.FINISHED] == 1


def test_a_fault_of_the_telemetry_harms_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and the sequence goes on."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    lines: list[MutableMapping[str, Any]]
    monkeypatch.setattr("draft_service.record.span_context", broken)
    monkeypatch.setattr("draft_service.record.log_ids", broken)
    fixture = Fixture()
    with capture_logs() as lines:
        fixture.open(1)
        assert len(fixture.book) == 1
        finish(fixture)
    assert fixture.records.faults.count == 2
    assert [line["event"] for line in lines] == ["telemetry failed"] * 2
    assert fixture.ended() == {"finished": 1}
