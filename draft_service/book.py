"""The sequences of one stream, and what the whole process can hold.

Decides which updates open, go on, end or get no drafts, and keeps what the stream has to say in
bounded form: which sequences have something unsent, and which are gone. Protobuf stays outside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from draft_service.record import End, SequenceRecord
from draft_service.sessions import Gap, Opening, Session, Unsent, Update
from outrider.serving.errors import InvalidRequest


class GoneReason(Enum):
    """Why a sequence gets no drafts as it stands."""

    EVICTED = "evicted"
    UNKNOWN = "unknown"
    FULL = "full"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class Gone:
    """One sequence that gets no drafts."""

    sequence_id: int
    epoch: int
    reason: GoneReason


@dataclass(slots=True)
class Capacity:
    """What the process holds, over all streams."""

    max_sequences: int
    max_len: int
    """Tokens of one sequence, the tail included."""
    max_tokens: int
    """Confirmed tokens of all sequences together."""
    num_sequences: int = 0
    num_tokens: int = 0

    def has_room(self) -> bool:
        """Another sequence may open."""
        return self.num_sequences < self.max_sequences


class SessionBook:
    """All sequences of one stream. Everything in it dies with `close()`."""

    def __init__(
        self,
        capacity: Capacity,
        on_open: Callable[[Session], None],
        on_close: Callable[[Session], None],
        begin: Callable[[int, Opening], SequenceRecord],
    ) -> None:
        """`begin(sequence id, opening)` makes the record of a new sequence."""
        self._capacity = capacity
        self._on_open = on_open
        self._on_close = on_close
        self._begin = begin
        self._sessions: dict[int, Session] = {}
        self._records: dict[int, SequenceRecord] = {}  # by sequence id, as the sessions
        self._unsent: dict[Session, None] = {}  # in the order in which they get their turn
        self._gone: OrderedDict[int, Gone] = OrderedDict()
        self._refused: OrderedDict[int, int] = OrderedDict()  # sequence id to the epoch told
        self._closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def has_something_to_say(self) -> bool:
        """A frame would not be empty."""
        return bool(self._unsent or self._gone)

    def apply(self, update: Update) -> Session | None:
        """Take one update. None when there is nothing to draft for."""
        if self._closed:
            return None
        session = self._sessions.get(update.sequence_id)
        if session is not None and update.epoch < session.epoch:
            return None
        if update.finished:
            self._refused.pop(update.sequence_id, None)
            self._forget(session)
            self._end(update.sequence_id, End.FINISHED)
            return None
        if update.epoch <= self._refused.get(update.sequence_id, -1):
            return None
        if session is None or update.epoch > session.epoch:
            self._forget(session)
            session = self._open(update)
        elif update.opening is not None:
            raise InvalidRequest("updates.open", f"epoch {update.epoch} is open already")
        return session if session is not None and self._confirm(session, update) else None

    def mark(self, session: Session) -> None:
        """`session` may have something to say."""
        if not session.closed and session.has_unsent:
            self._unsent.setdefault(session)

    def drop(self, session: Session) -> None:
        """It cannot be drafted for here: forget it, and say that there is no place for it."""
        if not session.closed:
            self._forget(session)
            self._end(session.sequence_id, End.FAILED)
            self._refuse(session.sequence_id, session.epoch, GoneReason.FULL)

    def next_unsent(
        self, max_tokens: int, max_with_probs: int = 1
    ) -> tuple[Session, Unsent] | None:
        """What the sequence whose turn it is has to say now, in at most that many tokens.

        `max_with_probs` counts where each token has its distribution beside it.
        """
        while self._unsent:
            session = next(iter(self._unsent))
            del self._unsent[session]
            unsent = session.take_unsent(
                max_with_probs if session.opening.sends_probs else max_tokens
            )
            if unsent is not None:
                self._records[session.sequence_id].proposed(len(unsent.tokens))
                self.mark(session)
                return session, unsent
        return None

    def next_gone(self) -> Gone | None:
        """The oldest sequence of which the target has not been told that it is gone."""
        return self._gone.popitem(last=False)[1] if self._gone else None

    def close(self) -> None:
        """Forget every sequence. May be called again."""
        self._closed = True
        for session in list(self._sessions.values()):
            self._forget(session)
        for sequence_id in list(self._records):
            self._end(sequence_id, End.LOST)
        self._gone.clear()
        self._refused.clear()

    def _open(self, update: Update) -> Session | None:
        if update.opening is None:
            self._refuse(update.sequence_id, update.epoch, GoneReason.UNKNOWN)
            return None
        record = self._records.get(update.sequence_id)
        if record is None:
            self._records[update.sequence_id] = self._begin(update.sequence_id, update.opening)
        else:
            record.resynced()
        if not self._capacity.has_room():
            self._refuse(update.sequence_id, update.epoch, GoneReason.FULL)
            return None
        session = Session(update.sequence_id, update.epoch, update.opening)
        self._sessions[update.sequence_id] = session
        self._refused.pop(update.sequence_id, None)
        self._capacity.num_sequences += 1
        self._on_open(session)
        return session

    def _confirm(self, session: Session, update: Update) -> bool:
        capacity = self._capacity
        reason = None
        if update.base_len == session.confirmed_len:
            if session.confirmed_len + len(update.tokens) > capacity.max_len:
                reason = GoneReason.TOO_LONG
            elif capacity.num_tokens + len(update.tokens) > capacity.max_tokens:
                reason = GoneReason.FULL
        if reason is None:
            try:
                session.apply(update)
            except Gap:
                reason = GoneReason.UNKNOWN
        if reason is not None:
            self._forget(session)
            self._refuse(update.sequence_id, update.epoch, reason)
            return False
        capacity.num_tokens += len(update.tokens)
        self._records[update.sequence_id].confirmed_len = session.confirmed_len
        self.mark(session)
        return True

    def _refuse(self, sequence_id: int, epoch: int, reason: GoneReason) -> None:
        self._end(sequence_id, End(reason.value))
        self._refused[sequence_id] = epoch
        self._gone[sequence_id] = Gone(sequence_id, epoch, reason)
        # A target that goes on naming sequences without reading the answers gains nothing here.
        most = 4 * self._capacity.max_sequences
        while len(self._refused) > most:
            self._refused.popitem(last=False)
        while len(self._gone) > most:
            self._gone.popitem(last=False)

    def _end(self, sequence_id: int, end: End) -> None:
        """Its record, if it has not ended yet, says so."""
        record = self._records.pop(sequence_id, None)
        if record is not None:
            record.end(end)

    def _forget(self, session: Session | None) -> None:
        if session is None:
            return
        session.closed = True
        self._unsent.pop(session, None)
        del self._sessions[session.sequence_id]
        self._capacity.num_sequences -= 1
        self._capacity.num_tokens -= session.confirmed_len
        self._on_close(session)
