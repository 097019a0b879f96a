"""What the gateway does behind every door: text in, text out, with tokens from a target in between.

The doors, gRPC and HTTP, make the same messages of what their clients send, and so get the same
checks, the same limits and the same text. A slow reader holds up only its own target stream,
because the next chunk is asked for after the last one was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace

from gateway.admission import Admission, Tenant
from gateway.answer import Answer
from gateway.answer_stream import ChoiceStreams
from gateway.caller import Caller
from gateway.encoder import Encoder
from gateway.record import RequestRecords
from gateway.requests import (
    CheckedRequest,
    TokenCaps,
    check_generate,
    check_prompt,
    fit_stopping,
    place_priority,
)
from gateway.routing import TargetPool
from gateway.target_client import TargetInfo, to_token_request
from gateway.tokenizer import ModelTokenizer
from outrider.params import InvalidParam, check_token_ids
from outrider.serving.errors import (
    DeadlinePassed,
    InvalidRequest,
    NotFound,
    OutriderError,
    Unauthenticated,
)
from protos.outrider.v1 import inference_pb2 as pb

_MOST_IDS = 2**20
"""Of `detokenize`; the text of more does not fit in a message, unless that may be very large."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this gateway."""

    name: str
    tokenizer: ModelTokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for and how long it may take, whoever sends it."""

    max_prompt_bytes: int
    max_message_bytes: int
    default_timeout_s: float = 0.0
    """Of requests whose client names no deadline. 0: as the longest."""
    max_timeout_s: float = 0.0
    """0: none."""
    caps: TokenCaps = TokenCaps()


class Inference:
    """The core of the gateway."""

    def __init__(
        self,
        model: ServedModel,
        targets: TargetPool,
        records: RequestRecords,
        admission: Admission,
        limits: Limits,
    ) -> None:
        self.model = model
        self._tokenizer = model.tokenizer
        self._targets = targets
        self._records = records
        self._admission = admission
        self._limits = limits
        self._encoder = Encoder(model.tokenizer, limits.max_prompt_bytes)

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self._admission.drain()

    def close(self) -> None:
        """Let the threads go."""
        self._encoder.close()

    def refuse_early(self, caller: Caller) -> OutriderError | None:
        """What a request of this caller would be refused with now, whatever it asks for."""
        try:
            tenant = self._admission.identify(caller.header("authorization"))
        except Unauthenticated as error:
            return error
        return self._admission.refusal(tenant)

    async def generate(
        self,
        request: pb.GenerateRequest | OutriderError | InvalidParam,
        caller: Caller,
        default_max_tokens: int = 0,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams one answer, or several side by side. Raises OutriderError and InvalidParam.

        An error in place of the request is one that the door has found: it is kept account of, and
        raised. default_max_tokens: the door's own, of a request that does not say; 0 for none.
        """
        with self._records.begin(request, caller) as record:
            if isinstance(request, Exception):
                raise request
            tenant = self._admission.identify(caller.header("authorization"))
            record.identified(tenant.name)
            with self._admission.admit(tenant) as place:
                time_remaining = self._time_remaining(caller)
                checked = self._check(request, tenant, default_max_tokens)
                record.checked(checked)
                route = self._targets.route(checked.params.answer.n)
                # A cancelled handler may be stuck in a yield; this runs all the same.
                caller.add_done_callback(lambda _: route.close())

                def on_stall(error: OutriderError) -> None:
                    record.end(error)
                    route.close()

                try:
                    checked, prompt_ids = await self._fit(checked, route.info, time_remaining())
                    place.spend(len(prompt_ids))
                    stream = self._streams(checked, len(prompt_ids), route.info)
                    chunks = route.chunks(
                        to_token_request(checked, prompt_ids, tenant.cache_salt),
                        time_remaining,
                        lambda address: record.routed(address, len(prompt_ids)),
                        record.metadata,
                    )
                    async with contextlib.aclosing(chunks):
                        async for chunk in chunks:
                            place.spend(len(chunk.tokens))
                            responses = stream.push(chunk)
                            record.received(chunk, responses)
                            for response in responses:
                                record.sending(response)
                                with caller.writing(on_stall):
                                    yield response
                                record.sent(response)
                            if stream.finished:
                                break
                    if not stream.stopped_here:
                        await route.settle()
                finally:
                    route.close()

    def _check(
        self, request: pb.GenerateRequest, tenant: Tenant, default_max_tokens: int
    ) -> CheckedRequest:
        """Everything that can be said before the prompt's length is known."""
        self._check_model(request.model)
        checked = check_generate(
            request,
            vocab_size=self._tokenizer.vocab_size,
            max_prompt_bytes=self._limits.max_prompt_bytes,
            # The target that will be asked is not known yet.
            max_model_len=self._targets.longest_model_len or self._tokenizer.max_model_len,
        )
        caps = self._limits.caps.with_key(tenant.max_tokens).with_default(default_max_tokens)
        return replace(
            checked,
            params=replace(checked.params, stopping=caps.apply(checked.params.stopping)),
            priority=place_priority(checked.priority, tenant.priority),
        )

    async def _fit(
        self, checked: CheckedRequest, target: TargetInfo, seconds: float | None
    ) -> tuple[CheckedRequest, list[int]]:
        """The request inside the target's limits, and its prompt's ids."""
        checked.params.speculation.validate(target.max_draft_tokens)
        try:
            async with asyncio.timeout(seconds):
                ids = await self._encoder.encode(checked.prompt, target.max_model_len)
        except TimeoutError as error:
            raise DeadlinePassed("the deadline passed before the prompt was tokenized") from error
        stopping = fit_stopping(
            checked.params.stopping, checked.prompt, len(ids), target.max_model_len
        )
        return replace(checked, params=replace(checked.params, stopping=stopping)), ids

    def _streams(
        self, checked: CheckedRequest, num_prompt_tokens: int, target: TargetInfo
    ) -> ChoiceStreams:
        params = checked.params
        answers = [
            Answer(self._tokenizer.detokenizer(), params.stopping, target.eos_token_ids)
            for _ in range(params.answer.n)
        ]
        return ChoiceStreams(answers, num_prompt_tokens, params.sampling.seed)

    async def tokenize(self, request: pb.TokenizeRequest, caller: Caller) -> pb.TokenizeResponse:
        """Ids as `generate` would see them."""
        with self._admitted(caller):
            self._check_model(request.model)
            prompt = check_prompt(
                request,
                vocab_size=self._tokenizer.vocab_size,
                max_prompt_bytes=self._limits.max_prompt_bytes,
            )
            ids, tokens = await self._encoder.tokenize(prompt)
            response = pb.TokenizeResponse(
                ids=ids, tokens=tokens, max_model_len=self._max_model_len
            )
            if response.ByteSize() > self._limits.max_message_bytes:
                raise InvalidRequest(
                    prompt.field, f"its {len(ids)} tokens do not fit in one message"
                )
            return response

    async def detokenize(
        self, request: pb.DetokenizeRequest, caller: Caller
    ) -> pb.DetokenizeResponse:
        """The text of ids, all at once."""
        with self._admitted(caller):
            self._check_model(request.model)
            if len(request.ids) > _MOST_IDS:  # before they cost the event loop anything
                raise InvalidRequest("ids", f"at most {_MOST_IDS}, got {len(request.ids)}")
            ids = tuple(request.ids)
            check_token_ids("ids", ids, self._tokenizer.vocab_size)
            text = await self._encoder.decode(ids, keep_special=request.keep_special)
            response = pb.DetokenizeResponse(text=text)
            if response.ByteSize() > self._limits.max_message_bytes:
                raise InvalidRequest("ids", "their text does not fit in one message")
            return response

    def list_models(self, caller: Caller) -> pb.ListModelsResponse:
        """The one model, and whether it can be asked now. Raises Unauthenticated."""
        self._admission.identify(caller.header("authorization"))
        model = pb.Model(
            name=self.model.name,
            max_model_len=self._max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            ready=self._targets.ready and not self._admission.draining,
        )
        return pb.ListModelsResponse(models=[model])

    def not_served(self, name: str) -> NotFound:
        """The error of who asks for another model."""
        return NotFound(f"model: {name[:80]!r} is not served here, {self.model.name!r} is")

    @property
    def _max_model_len(self) -> int:
        return self._targets.max_model_len or self._tokenizer.max_model_len

    @contextlib.contextmanager
    def _admitted(self, caller: Caller) -> Iterator[None]:
        tenant = self._admission.identify(caller.header("authorization"))
        with self._admission.admit(tenant):
            yield

    def _time_remaining(self, caller: Caller) -> Callable[[], float | None]:
        """Seconds until the client's deadline or the gateway's own, whichever comes first."""
        named = caller.time_remaining() is not None
        limits = [self._limits.max_timeout_s, 0.0 if named else self._limits.default_timeout_s]
        limit_s = min((each for each in limits if each), default=None)
        if limit_s is None:
            return caller.time_remaining
        end_s = time.monotonic() + limit_s

        def remaining() -> float | None:
            theirs = caller.time_remaining()
            ours = max(0.0, end_s - time.monotonic())
            return ours if theirs is None else min(ours, theirs)

        return remaining

    def _check_model(self, name: str) -> None:
        if name and name != self.model.name:
            raise self.not_served(name)
