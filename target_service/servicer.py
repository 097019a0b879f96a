"""The Target service on the wire: protobuf in, protobuf out, and nothing decided here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from outrider.serving.errors import OutriderError
from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc
from target_service.admission import Door
from target_service.batcher import Batcher
from target_service.request import Piece, Reason, Request
from target_service.status import StatusReporter
from target_service.stream import TokenStream

log = structlog.get_logger(__name__)

_REASONS = {
    Reason.STOP: sampling_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
}


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Generate and GetStatus."""

    def __init__(
        self,
        door: Door,
        batcher: Batcher,
        status: StatusReporter,
        *,
        stream_tokens: int,
        stall_s: float,
    ) -> None:
        self._door = door
        self._batcher = batcher
        self._status = status
        self._stream_tokens = stream_tokens
        self._stall_s = stall_s

    async def Generate(
        self, request: target_pb2.TokenRequest, context: Any
    ) -> AsyncIterator[target_pb2.TokenChunk]:
        """Stream the tokens of one request; whatever ends the call ends the request."""
        params = self._door.check(request)
        stream = TokenStream(
            self._stream_tokens,
            self._stall_s,
            on_drained=self._batcher.nudge,
            on_stall=lambda: self._batcher.stall(admitted),
        )
        admitted = self._door.admit(request, params, lambda: stream)
        first_index = admitted.num_generated
        started = time.monotonic()
        self._batcher.submit(admitted)
        # The handler of a cancelled call may be suspended in a yield; this is told in any case.
        context.add_done_callback(lambda _: self._batcher.cancel(admitted))
        outcome = "cancelled"
        try:
            while True:
                piece = await stream.get()
                yield _chunk(admitted, piece, first_index)
                first_index += len(piece.tokens)
                if piece.reason is not None:
                    outcome = piece.reason.value
                    return
        except OutriderError as error:
            outcome = error.code.name.lower()
            raise
        finally:
            self._batcher.cancel(admitted)
            stream.close()
            _log_request(admitted, outcome, time.monotonic() - started)

    async def GetStatus(
        self, request: target_pb2.TargetGetStatusRequest, context: Any
    ) -> target_pb2.TargetGetStatusResponse:
        """What the target is and does."""
        return self._status.report()


def _chunk(request: Request, piece: Piece, first_index: int) -> target_pb2.TokenChunk:
    counts = piece.speculation
    stats = sampling_pb2.SpeculationStats(
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_per_position=counts.accepted_per_position,
        unused=counts.unused,
        plain_steps=counts.plain_steps,
    )
    chunk = target_pb2.TokenChunk(
        index=0,
        first_index=first_index,
        tokens=[
            sampling_pb2.GeneratedToken(id=token.id, drafted=token.drafted)
            for token in piece.tokens
        ],
        speculation=stats,
    )
    if piece.reason is not None:
        usage = sampling_pb2.Usage(
            prompt_tokens=request.sequence.prompt_len,
            completion_tokens=first_index + len(piece.tokens),
            cached_prompt_tokens=request.num_cached or 0,
        )
        chunk.finish.CopyFrom(
            target_pb2.TokenFinish(reason=_REASONS[piece.reason], usage=usage, speculation=stats)
        )
    return chunk


def _log_request(request: Request, outcome: str, seconds: float) -> None:
    log.info(
        "request",
        request_id=request.request_id,
        outcome=outcome,
        prompt_tokens=request.sequence.prompt_len,
        generated_tokens=request.num_generated,
        rounds=request.counts.rounds,
        drafted=request.counts.drafted,
        accepted=request.counts.accepted,
        seconds=round(seconds, 4),
    )
