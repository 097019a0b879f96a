"""Protobuf to the draft service's own values and back: checks, updates in, frames out.

The only file next to the servicer that knows the messages. What breaks the protocol raises
InvalidRequest with the field's name.
"""

from __future__ import annotations

from draft_service.book import Gone, GoneReason, SessionBook
from draft_service.proposers.base import PoolReport
from draft_service.sessions import Opening, Session, Unsent, Update
from outrider.engine.sparse_probs import MAX_SPARSE_ENTRIES, SparseProbs
from outrider.params import MAX_STOP_TOKEN_IDS, InvalidParam
from outrider.serving.errors import InvalidRequest
from outrider.serving.handshake import check_compatible
from outrider.serving.wire import sampling_from_proto, verification_from_proto
from protos.outrider.v1 import draft_pb2, target_pb2

_MIN_FRAME_BYTES = 4096  # smaller limits of a peer are not worth splitting one proposal for
_PROPOSAL_BYTES = 64  # tags, lengths and the numbers of a proposal
_TOKEN_BYTES = 9  # a varint of an id and a float
_TOKEN_WITH_PROBS_BYTES = _TOKEN_BYTES + 12 + 9 * MAX_SPARSE_ENTRIES
_GONE_BYTES = 24
_MAX_WINDOW = 2**20  # anything above is a mistake, not a wish
_MAX_STOP_TOKEN_IDS = 2 * MAX_STOP_TOKEN_IDS
"""A request's own, and as many again that the model ends texts with."""
_MAX_UINT32 = 2**32 - 1
_ANY_VOCAB = 2**31

_REASONS = {
    GoneReason.EVICTED: draft_pb2.SequenceGone.REASON_EVICTED,
    GoneReason.UNKNOWN: draft_pb2.SequenceGone.REASON_UNKNOWN,
    GoneReason.FULL: draft_pb2.SequenceGone.REASON_FULL,
    GoneReason.TOO_LONG: draft_pb2.SequenceGone.REASON_TOO_LONG,
}


def target_hello(frame: draft_pb2.SpeculateRequest, ours: draft_pb2.Hello) -> draft_pb2.Hello:
    """The Hello of a stream's first frame. Raises Incompatible when the two do not match."""
    if not frame.HasField("hello"):
        raise InvalidRequest("hello", "the first frame must be a Hello")
    if frame.updates:
        raise InvalidRequest("updates", "must wait until the drafter has answered the Hello")
    check_compatible(frame.hello, ours)
    return frame.hello


class UpdateReader:
    """Turns the frames of one stream into updates; holds what the target's Hello said."""

    def __init__(self, hello: draft_pb2.Hello, max_window: int, max_len: int) -> None:
        self._vocab_size = hello.vocab_size or _ANY_VOCAB
        self._max_window = min(max_window, hello.limits.max_window or max_window)
        self._max_len = min(max_len, hello.limits.max_len or max_len)

    def read(self, frame: draft_pb2.SpeculateRequest, now_s: float) -> list[Update]:
        """The updates of one frame, all of them checked before the first is used."""
        if frame.HasField("hello"):
            raise InvalidRequest("hello", "only the first frame may carry a Hello")
        seen: set[int] = set()
        updates = []
        for i, message in enumerate(frame.updates):
            if message.sequence_id in seen:
                raise InvalidRequest(
                    f"updates[{i}].sequence_id", f"{message.sequence_id} twice in one frame"
                )
            seen.add(message.sequence_id)
            updates.append(self._update(f"updates[{i}]", message, now_s))
        return updates

    def _update(self, field: str, message: draft_pb2.SequenceUpdate, now_s: float) -> Update:
        if message.window > _MAX_WINDOW:
            raise InvalidRequest(
                f"{field}.window", f"must be at most {_MAX_WINDOW}, got {message.window}"
            )
        if message.tokens and max(message.tokens) >= self._vocab_size:
            raise InvalidRequest(
                f"{field}.tokens", f"ids must be below {self._vocab_size}, the Hello's vocab_size"
            )
        opening = None
        if message.HasField("open"):
            if message.base_len:
                raise InvalidRequest(
                    f"{field}.base_len", f"must be 0 on open, got {message.base_len}"
                )
            opening = self._opening(f"{field}.open", message.open)
        return Update(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            update_seq=message.update_seq,
            base_len=message.base_len,
            tokens=list(message.tokens),
            window=min(message.window, self._max_window),
            finished=message.finished,
            opening=opening,
            received_s=now_s,
        )

    def _opening(self, field: str, message: draft_pb2.SequenceOpen) -> Opening:
        if message.max_len < 1:
            raise InvalidRequest(f"{field}.max_len", "must be at least 1")
        if len(message.stop_token_ids) > _MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"{field}.stop_token_ids",
                f"at most {_MAX_STOP_TOKEN_IDS} ids, got {len(message.stop_token_ids)}",
            )
        sampling = sampling_from_proto(message.sampling)
        try:
            sampling.validate(self._vocab_size)
            verification = verification_from_proto("verification", message.verification)
        except InvalidParam as error:
            raise InvalidRequest(f"{field}.{error.field}", error.message) from error
        return Opening(
            prompt_len=message.prompt_len,
            max_len=min(message.max_len, self._max_len),
            sampling=sampling,
            min_tokens=message.min_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            vocab_size=self._vocab_size,
            verification=verification,
            traceparent=message.traceparent,
        )


def next_frame(book: SessionBook, max_bytes: int, now_s: float) -> draft_pb2.SpeculateResponse:
    """What the stream has to say now, as much as one frame holds."""
    frame = draft_pb2.SpeculateResponse()
    # Two are held back: a load report, and the head of the last proposal.
    room = max(_MIN_FRAME_BYTES, max_bytes) - 2 * _PROPOSAL_BYTES
    while room > _GONE_BYTES and (gone := book.next_gone()) is not None:
        frame.gone.append(_gone_to_proto(gone))
        room -= _GONE_BYTES
    while room > _PROPOSAL_BYTES + _TOKEN_WITH_PROBS_BYTES:
        spoken = book.next_unsent(room // _TOKEN_BYTES, room // _TOKEN_WITH_PROBS_BYTES)
        if spoken is None:
            break
        session, unsent = spoken
        frame.proposals.append(_proposal_to_proto(session, unsent, now_s))
        token_bytes = _TOKEN_WITH_PROBS_BYTES if unsent.probs else _TOKEN_BYTES
        room -= _PROPOSAL_BYTES + token_bytes * len(unsent.tokens)
    return frame


def _proposal_to_proto(session: Session, unsent: Unsent, now_s: float) -> draft_pb2.Proposal:
    return draft_pb2.Proposal(
        sequence_id=session.sequence_id,
        epoch=session.epoch,
        update_seq=session.update_seq,
        seen_len=session.confirmed_len,
        start=unsent.start,
        tokens=unsent.tokens,
        logprobs=unsent.logprobs,
        sparse_probs=[_probs_to_proto(each) for each in unsent.probs],
        held_us=_microseconds(now_s - session.received_s),
        compute_us=_microseconds(unsent.compute_s),
    )


def _probs_to_proto(probs: SparseProbs) -> draft_pb2.SparseProbs:
    return draft_pb2.SparseProbs(ids=probs.ids, probs=probs.probs)


def _gone_to_proto(gone: Gone) -> draft_pb2.SequenceGone:
    return draft_pb2.SequenceGone(
        sequence_id=gone.sequence_id, epoch=gone.epoch, reason=_REASONS[gone.reason]
    )


def load_to_proto(
    sessions: int, queue: int, step_s: float, capacity: int
) -> target_pb2.DrafterLoad:
    """The load report of this process."""
    return target_pb2.DrafterLoad(
        sessions=sessions, queue=queue, step_us=_microseconds(step_s), capacity=capacity
    )


def _microseconds(seconds: float) -> int:
    return min(_MAX_UINT32, max(0, round(seconds * 1e6)))


def pool_to_proto(pool: PoolReport | None) -> target_pb2.BlockPoolStatus | None:
    """A proposer's cache as targets see it."""
    if pool is None:
        return None
    return target_pb2.BlockPoolStatus(
        total=pool.total,
        free=pool.free,
        used=pool.total - pool.free,
        block_size=pool.block_size,
        integrity_errors=pool.integrity_errors,
        wasted_slots=pool.wasted_slots,
        kv_dtype=pool.kv_dtype,
        block_bytes=pool.block_bytes,
    )
