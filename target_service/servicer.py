"""The Target service on the wire: protobuf in, protobuf out, and nothing decided here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from outrider.serving.errors import InvalidRequest
from outrider.serving.interceptors import takes_malformed
from outrider.serving.unread import UnreadStreams
from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc
from target_service.admission import Door
from target_service.batcher import Batcher
from target_service.counts import SpeculationSnapshot
from target_service.observer import Observer
from target_service.record import Outcome, RequestRecord
from target_service.request import (
    Logprobs,
    Piece,
    PromptToken,
    Reason,
    Request,
    Token,
)
from target_service.status import StatusReporter
from target_service.stream import TokenStream

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
        observer: Observer,
        *,
        model: str,
        stream_tokens: int,
        stall_s: float,
    ) -> None:
        self._door = door
        self._batcher = batcher
        self._status = status
        self._observer = observer
        self._model = model
        self._stream_tokens = stream_tokens
        self._unread = UnreadStreams(stall_s)

    @takes_malformed
    async def Generate(
        self, request: target_pb2.TokenRequest | InvalidRequest, context: Any
    ) -> AsyncIterator[target_pb2.TokenChunk]:
        """Stream the tokens of one request; whatever ends the call ends the request."""
        asked = target_pb2.TokenRequest() if isinstance(request, InvalidRequest) else request
        record = RequestRecord(self._observer, self._model, asked, context)
        choices: list[Request] = []

        def end(error: BaseException | None) -> None:
            """Whoever says first how it ended is believed; the others change nothing."""
            record.end(error)
            self._batcher.cancel(*choices, failed=record.outcome is Outcome.FAILED)

        # The handler of a cancelled call may be suspended in a yield; this is told in any case.
        context.add_done_callback(lambda _: end(asyncio.CancelledError()))
        try:
            if isinstance(request, InvalidRequest):
                raise request
            params = self._door.check(request)
            stream = TokenStream(self._stream_tokens, on_drained=self._batcher.nudge)
            admitted = self._door.admit(request, params, stream, record.traceparent)
            self._batcher.submit(*admitted)
            choices += admitted
            record.admitted(choices)
            delivery = _Delivery(choices)
            while delivery.num_open:
                chunk = delivery.chunk(await stream.get())
                with self._unread.writing(context, end):
                    yield chunk
        except BaseException as error:
            end(error)
            raise
        end(None)

    async def GetStatus(
        self, request: target_pb2.TargetGetStatusRequest, context: Any
    ) -> target_pb2.TargetGetStatusResponse:
        """What the target is and does."""
        return self._status.report()


class _Delivery:
    """The pieces of all choices as the chunks of one stream."""

    def __init__(self, choices: list[Request]) -> None:
        self._choices = choices
        self._next_index = [choice.num_generated for choice in choices]
        self._unseen = {choice.index for choice in choices}
        self.num_open = len(choices)
        """Choices that have not ended."""

    def chunk(self, piece: Piece) -> target_pb2.TokenChunk:
        """The chunk of a piece."""
        index = piece.index
        choice, first_index = self._choices[index], self._next_index[index]
        self._next_index[index] += len(piece.tokens)
        stats = _stats_to_proto(piece.speculation)
        chunk = target_pb2.TokenChunk(
            index=index,
            first_index=first_index,
            tokens=[_token_to_proto(token) for token in piece.tokens],
            speculation=stats,
            prompt_tokens=[_prompt_token_to_proto(token) for token in piece.prompt],
        )
        if index in self._unseen:
            self._unseen.remove(index)
            chunk.seed = choice.params.sampling.seed
            if index == 0:
                chunk.cached_prompt_tokens = choice.num_cached or 0
        if piece.reason is not None:
            self.num_open -= 1
            usage = sampling_pb2.Usage(completion_tokens=self._next_index[index])
            if index == 0:
                usage.prompt_tokens = choice.sequence.prompt_len
                usage.cached_prompt_tokens = choice.num_cached or 0
            chunk.finish.CopyFrom(
                target_pb2.TokenFinish(
                    reason=_REASONS[piece.reason], usage=usage, speculation=stats
                )
            )
        return chunk


def _stats_to_proto(counts: SpeculationSnapshot) -> sampling_pb2.SpeculationStats:
    return sampling_pb2.SpeculationStats(
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_per_position=counts.accepted_per_position,
        unused=counts.unused,
        plain_steps=counts.plain_steps,
    )


def _token_to_proto(token: Token) -> sampling_pb2.GeneratedToken:
    message = sampling_pb2.GeneratedToken(id=token.id, drafted=token.drafted)
    if token.logprobs is not None:
        message.logprob = token.logprobs.value
        message.top.extend(_top_to_proto(token.logprobs))
    return message


def _prompt_token_to_proto(token: PromptToken) -> sampling_pb2.PromptToken:
    message = sampling_pb2.PromptToken(id=token.id)
    if token.logprobs is not None:
        message.logprob = token.logprobs.value
        message.top.extend(_top_to_proto(token.logprobs))
    return message


def _top_to_proto(logprobs: Logprobs) -> list[sampling_pb2.TopLogprob]:
    return [sampling_pb2.TopLogprob(id=i, logprob=value) for i, value in logprobs.top]
