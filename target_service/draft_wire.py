"""The draft protocol in protobuf, as the target writes and reads it."""

from __future__ import annotations

from collections import OrderedDict

from outrider.engine.sparse_probs import MAX_SPARSE_ENTRIES, SparseProbs
from outrider.serving.handshake import MAX_FRAME_BYTES
from outrider.serving.wire import sampling_to_proto, verification_to_proto
from protos.outrider.v1 import draft_pb2
from target_service.draft_link import MAX_UPDATE_TOKENS, SequenceLink, Update

_TOKEN_BYTES = 4  # a varint of a token id, generously
_UPDATE_BYTES = 64
_OPEN_BYTES = 16 * 1024  # settings with a full logit_bias map


def next_frame(
    dirty: OrderedDict[int, SequenceLink], now_s: float, max_bytes: int = 0
) -> draft_pb2.SpeculateRequest:
    """Updates of as many sequences as fit; takes those that are up to date out of `dirty`.

    A sequence whose prefix is longer than one update goes to the end of the line. `max_bytes` is
    the drafter's limit, 0 if it has none.
    """
    frame = draft_pb2.SpeculateRequest()
    room = min(MAX_FRAME_BYTES, max_bytes or MAX_FRAME_BYTES)
    for _ in range(len(dirty)):
        sequence_id, link = next(iter(dirty.items()))
        room -= _UPDATE_BYTES + (_OPEN_BYTES if link.opening else 0)
        if frame.updates and room < _TOKEN_BYTES:
            break
        del dirty[sequence_id]
        update = link.next_update(now_s, max(1, min(MAX_UPDATE_TOKENS, room // _TOKEN_BYTES)))
        room -= _TOKEN_BYTES * len(update.tokens)
        frame.updates.append(_update_to_proto(update))
        if link.needs_update and not link.finished:
            dirty[sequence_id] = link
    return frame


def sparse_probs_from_proto(message: draft_pb2.SparseProbs) -> SparseProbs | None:
    """The distribution; None if it is none."""
    if len(message.ids) > MAX_SPARSE_ENTRIES or len(message.probs) > MAX_SPARSE_ENTRIES:
        return None
    probs = SparseProbs(tuple(message.ids), tuple(message.probs))
    return probs if probs.is_valid else None


def _update_to_proto(update: Update) -> draft_pb2.SequenceUpdate:
    message = draft_pb2.SequenceUpdate(
        sequence_id=update.sequence_id,
        epoch=update.epoch,
        update_seq=update.update_seq,
        base_len=update.base_len,
        tokens=update.tokens,
        window=update.window,
        finished=update.finished,
    )
    if update.facts is not None:
        facts = update.facts
        message.open.CopyFrom(
            draft_pb2.SequenceOpen(
                prompt_len=facts.prompt_len,
                max_len=facts.max_len,
                sampling=sampling_to_proto(facts.sampling),
                partition=facts.partition,
                verification=verification_to_proto(facts.verification),
                min_tokens=facts.min_tokens,
                stop_token_ids=facts.stop_token_ids,
                traceparent=facts.traceparent,
            )
        )
    return message
