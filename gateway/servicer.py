"""The Inference service: text in, text out, with tokens from a target in between.

The methods, each in the order of a request. A slow reader holds up only its own
target stream, because the next chunk is asked for after the last one was written. One that has
stopped reading loses its stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway.answer import Answer
from gateway.answer_stream import ChoiceStreams
from gateway.encoder import Encoder
from gateway.record import RequestRecords
from gateway.requests import check_generate, check_prompt, fit_stopping
from gateway.routing import TargetPool
from gateway.target_client import to_token_request
from gateway.tokenizer import ModelTokenizer
from outrider.params import check_token_ids
from outrider.serving.errors import InvalidRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.serving.interceptors import takes_malformed
from outrider.serving.unread import UnreadStreams
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

_Context = Any  # grpc.aio.ServicerContext: generic over both message types
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this gateway."""

    name: str
    tokenizer: ModelTokenizer


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """All four methods."""

    def __init__(
        self,
        model: ServedModel,
        targets: TargetPool,
        records: RequestRecords,
        *,
        max_concurrent: int,
        request_timeout_s: float,
        stall_s: float,
        max_prompt_bytes: int,
        max_message_bytes: int,
    ) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._targets = targets
        self._records = records
        self._max_concurrent = max_concurrent
        self._request_timeout_s = request_timeout_s
        self._unread = UnreadStreams(stall_s)
        self._max_prompt_bytes = max_prompt_bytes
        self._max_message_bytes = max_message_bytes
        self._num_running = 0
        self._draining = False
        self._encoder = Encoder(model.tokenizer, max_prompt_bytes)

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self._draining = True

    def close(self) -> None:
        """Let the threads go."""
        self._encoder.close()

    @takes_malformed
    async def Generate(
        self, request: pb.GenerateRequest | InvalidRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one answer, or several side by side."""
        with self._records.begin(request, context) as record, self._admit():
            if isinstance(request, InvalidRequest):
                raise request
            time_remaining = self._time_remaining(context)
            self._check_model(request.model)
            checked = check_generate(
                request,
                vocab_size=self._tokenizer.vocab_size,
                max_prompt_bytes=self._max_prompt_bytes,
            )
            record.checked(checked)
            route = self._targets.route(checked.params.answer.n)
            # A cancelled handler may be stuck in a yield; this runs all the same.
            context.add_done_callback(lambda _: route.close())
            info = route.info
            checked.params.speculation.validate(info.max_draft_tokens)
            prompt_ids = await self._encoder.encode(checked.prompt, info.max_model_len)
            stopping = fit_stopping(
                checked.params.stopping, checked.prompt, len(prompt_ids), info.max_model_len
            )
            answers = [
                Answer(self._tokenizer.detokenizer(), stopping, info.eos_token_ids)
                for _ in range(checked.params.answer.n)
            ]
            stream = ChoiceStreams(answers, len(prompt_ids), checked.params.sampling.seed)
            chunks = route.chunks(
                to_token_request(checked, prompt_ids, stopping),
                time_remaining,
                lambda address: record.routed(address, len(prompt_ids)),
                record.metadata,
            )

            def on_stall(error: OutriderError) -> None:
                record.end(error)
                route.close()

            try:
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        responses = stream.push(chunk)
                        record.received(chunk, responses)
                        for response in responses:
                            record.sending(response)
                            with self._unread.writing(context, on_stall):
                                yield response
                            record.sent(response)
                        if stream.finished:
                            break
                if not stream.stopped_here:
                    await route.settle()
            finally:
                route.close()

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Ids as Generate would see them."""
        with self._admit():
            self._check_model(request.model)
            prompt = check_prompt(
                request,
                vocab_size=self._tokenizer.vocab_size,
                max_prompt_bytes=self._max_prompt_bytes,
            )
            ids, tokens = await self._encoder.tokenize(prompt)
            response = pb.TokenizeResponse(
                ids=ids, tokens=tokens, max_model_len=self._max_model_len
            )
            if response.ByteSize() > self._max_message_bytes:
                raise InvalidRequest(
                    prompt.field, f"its {len(ids)} tokens do not fit in one message"
                )
            return response

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: _Context
    ) -> pb.DetokenizeResponse:
        """The text of ids, all at once."""
        with self._admit():
            self._check_model(request.model)
            ids = tuple(request.ids)
            check_token_ids("ids", ids, self._tokenizer.vocab_size)
            text = await self._encoder.decode(ids, keep_special=request.keep_special)
            response = pb.DetokenizeResponse(text=text)
            if response.ByteSize() > self._max_message_bytes:
                raise InvalidRequest("ids", "their text does not fit in one message")
            return response

    async def ListModels(
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """The one model, and whether it can be asked now."""
        model = pb.Model(
            name=self._model.name,
            max_model_len=self._max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            ready=self._targets.ready and not self._draining,
        )
        return pb.ListModelsResponse(models=[model])

    @property
    def _max_model_len(self) -> int:
        return self._targets.max_model_len or self._tokenizer.max_model_len

    @contextlib.contextmanager
    def _admit(self) -> Iterator[None]:
        if self._draining:
            raise Unavailable("the gateway is shutting down")
        if self._num_running >= self._max_concurrent:
            raise Overloaded(
                f"the gateway serves {self._max_concurrent} requests at once", _RETRY_AFTER_S
            )
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _time_remaining(self, context: _Context) -> Callable[[], float | None]:
        """Seconds until the client's deadline or the gateway's own, whichever comes first."""
        limit_s = self._request_timeout_s
        end_s = time.monotonic() + limit_s

        def remaining() -> float | None:
            theirs: float | None = context.time_remaining()
            if not limit_s:
                return theirs
            ours = max(0.0, end_s - time.monotonic())
            return ours if theirs is None else min(ours, theirs)

        return remaining

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise NotFound(f"model: {name[:80]!r} is not served here, {self._model.name!r} is")
