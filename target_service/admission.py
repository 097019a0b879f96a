"""From a TokenRequest to a Request: every check at the door, so that no bad value meets a step.

Knows the protocol and the engine's limits, and nothing of running requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engine.config import ModelConfig
from outrider.engine.prefix import BlockChain
from outrider.engine.sampling import TokenChooser
from outrider.engine.sequence import Sequence
from outrider.params import (
    MAX_PRIORITY,
    GenerationParams,
    VerificationMode,
    check_range,
    check_request_id,
    check_token_ids,
)
from outrider.serving.errors import InvalidRequest
from outrider.serving.wire import (
    answer_from_proto,
    sampling_from_proto,
    speculation_from_proto,
    stopping_from_proto,
)
from outrider_kernels.noise import child_seed
from protos.outrider.v1 import target_pb2
from target_service.draft_link import DraftedSequence, SequenceFacts
from target_service.draft_tail import DraftTail, DraftTotals
from target_service.request import Output, Request
from target_service.window import SequenceWindow, StepCost

_MAX_CACHE_SALT_BYTES = 128


@dataclass(frozen=True)
class Limits:
    """What this target can do."""

    max_model_len: int
    """Longest sequence, from the model, the settings and the pool."""
    block_size: int
    """Tokens of a block of the paged cache."""
    max_requests: int
    """Most requests here at once, each choice of `n` being one."""
    max_draft_tokens: int
    max_window: int
    draft_wait_s: float


class Door:
    """Checks requests and makes them ready to run."""

    def __init__(
        self, model: ModelConfig, limits: Limits, cost: StepCost, totals: DraftTotals
    ) -> None:
        self._model = model
        self._limits = limits
        self._cost = cost
        self._totals = totals

    def check(self, message: target_pb2.TokenRequest) -> GenerationParams:
        """The request's settings. Raises InvalidParam or InvalidRequest naming the field."""
        params = GenerationParams(
            sampling_from_proto(message.sampling),
            stopping_from_proto(message.stopping),
            speculation_from_proto(message.speculation),
            answer_from_proto(message),
        )
        vocab_size = self._model.vocab_size
        params.sampling.validate(vocab_size)
        params.stopping.validate(vocab_size)
        params.speculation.validate(self._limits.max_draft_tokens)
        params.answer.validate()
        check_range("n", params.answer.n, 1, self._limits.max_requests)
        if params.answer.n > 1 and message.resumed_token_ids:
            raise InvalidRequest("n", "must be 1 when resumed_token_ids are given")
        if params.stopping.stop:
            raise InvalidRequest("stopping.stop", "stop strings are the gateway's work")
        if not params.sampling.greedy and not message.sampling.HasField("seed"):
            raise InvalidRequest("sampling.seed", "must be set when temperature is above 0")
        check_range("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_request_id(message.request_id)
        if len(message.cache_salt) > _MAX_CACHE_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"at most {_MAX_CACHE_SALT_BYTES} bytes")
        self._check_tokens(message)
        return params

    def admit(
        self,
        message: target_pb2.TokenRequest,
        params: GenerationParams,
        output: Output,
        traceparent: str = "",
    ) -> list[Request]:
        """The request's choices, which can be run as they are."""
        choices = [self._choice(message, params, output, traceparent)]
        for index in range(1, params.answer.n):
            seed = child_seed(params.sampling.seed, index)
            own = replace(
                params,
                sampling=replace(params.sampling, seed=seed),
                answer=replace(params.answer, prompt_logprobs=None),
            )
            choices.append(self._choice(message, own, output, traceparent, index, after=choices[0]))
        return choices

    def _choice(
        self,
        message: target_pb2.TokenRequest,
        params: GenerationParams,
        output: Output,
        traceparent: str,
        index: int = 0,
        after: Request | None = None,
    ) -> Request:
        sequence = Sequence(
            [*message.token_ids, *message.resumed_token_ids], len(message.token_ids)
        )
        stopping = params.stopping
        eos = () if stopping.ignore_eos else self._model.eos_token_ids
        stop_ids = frozenset((*eos, *stopping.stop_token_ids))
        max_len = self._limits.max_model_len
        if stopping.max_tokens is not None:
            max_len = min(max_len, sequence.prompt_len + stopping.max_tokens)
        window = SequenceWindow(
            params.speculation,
            self._cost,
            max_draft_tokens=self._limits.max_draft_tokens,
            max_window=self._limits.max_window,
            max_wait_s=self._limits.draft_wait_s,
        )
        request = Request(
            request_id=message.request_id,
            sequence=sequence,
            params=params,
            output=output,
            max_len=max_len,
            stop_ids=stop_ids,
            priority=message.priority,
            index=index,
            after=after,
            window=window,
            drafts=None,
            chain=BlockChain(message.cache_salt, self._limits.block_size),
            chooser=TokenChooser(
                params.sampling,
                self._model.vocab_size,
                prompt_len=sequence.prompt_len,
                min_tokens=stopping.min_tokens,
                stop_token_ids=stop_ids,
                num_tokens=self._model.num_tokens,
            ),
        )
        if window.wants_drafts:
            request.drafts = self._drafted(request, message.cache_salt, traceparent)
        return request

    def _drafted(self, request: Request, partition: bytes, traceparent: str) -> DraftedSequence:
        token_ids = request.sequence.token_ids
        verification = request.params.speculation.verification
        tail = DraftTail(
            token_ids,
            self._model.vocab_size,
            self._limits.max_window,
            self._totals,
            with_probs=verification is VerificationMode.REJECTION,
        )
        facts = SequenceFacts(
            prompt_len=request.sequence.prompt_len,
            max_len=request.max_len,
            sampling=request.params.sampling,
            partition=partition,
            verification=verification,
            min_tokens=request.params.stopping.min_tokens,
            stop_token_ids=tuple(sorted(request.stop_ids)),
            traceparent=traceparent,
        )
        return DraftedSequence(token_ids, tail, facts)

    def _check_tokens(self, message: target_pb2.TokenRequest) -> None:
        if not message.token_ids:
            raise InvalidRequest("token_ids", "must have at least one id")
        length = len(message.token_ids) + len(message.resumed_token_ids)
        limit = self._limits.max_model_len
        if length >= limit:
            raise InvalidRequest("token_ids", f"{length} tokens leave no room in {limit}")
        for name in ("token_ids", "resumed_token_ids"):
            check_token_ids(name, getattr(message, name), self._model.vocab_size)
        cap = message.stopping.max_tokens if message.stopping.HasField("max_tokens") else None
        if cap is not None and cap <= len(message.resumed_token_ids):
            raise InvalidRequest("stopping.max_tokens", f"{cap} tokens were generated already")
