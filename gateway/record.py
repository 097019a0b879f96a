"""One request from its arrival to its end, however it ends: its counts, its log line, its span.

Never holds a word of its text, unless the operator asks for that (`--log-text`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import structlog
from opentelemetry.trace import INVALID_SPAN, Span

from gateway import spans
from gateway.caller import Caller
from gateway.ending import FINISHED, Ending, Outcome, judge
from gateway.metrics import GatewayMetrics
from gateway.requests import CheckedRequest
from outrider.params import MAX_REQUEST_ID_BYTES
from outrider.serving.deadline import Deadline
from outrider.serving.tracing import Tracing, log_ids, to_metadata
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2

log = structlog.get_logger(__name__)

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


class RequestRecords:
    """Makes the records of all requests."""

    def __init__(
        self, model: str, metrics: GatewayMetrics, tracing: Tracing, *, log_text: bool
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.tracing = tracing
        self.log_text = log_text

    def begin(self, request: pb.GenerateRequest | Exception, caller: Caller) -> RequestRecord:
        """A request has arrived, or what the door has found in its place."""
        record = RequestRecord(self, request, caller)
        # A cancelled handler may be stuck in a yield; this runs all the same.
        caller.add_done_callback(lambda _: record.end(asyncio.CancelledError()))
        return record


class RequestRecord:
    """Told of everything as it happens; a context manager around the whole request.

    `end` may be called many times: who says first how it ended is believed.
    """

    def __init__(
        self, shared: RequestRecords, request: pb.GenerateRequest | Exception, caller: Caller
    ) -> None:
        self._shared = shared
        self._metrics = shared.metrics
        self._caller = caller
        self._started_s = self._last_token_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._patience_s: float | None = caller.time_remaining()
        self._ending: Ending | None = None
        self._fields: dict[str, object] = {"door": caller.door}  # of the log line
        self._checked: CheckedRequest | None = None
        self._texts: dict[int, list[str]] = {}
        self._stats: dict[int, sampling_pb2.SpeculationStats] = {}  # by choice
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._num_moves = -1
        self._num_prompt = 0
        self._num_cached = 0
        self._begun = False  # a target has sent something
        self._num_generated = self._num_delivered = self._num_held = 0
        self._metrics.started(caller.door)
        self._span: Span = INVALID_SPAN
        with self._metrics.faults:
            request_id = caller.request_id
            if isinstance(request, pb.GenerateRequest):
                request_id = request.request_id[:MAX_REQUEST_ID_BYTES]
            if request_id:
                self._fields["request_id"] = request_id
            self._span = spans.start(shared.tracing, shared.model, request, request_id, caller)
            # Of the call's own task: whatever is logged on its way says whose it is.
            structlog.contextvars.bind_contextvars(request_id=request_id, **log_ids(self._span))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to a target carries, so that its span becomes a child of this one's."""
        with self._metrics.faults:
            return to_metadata(self._span)
        return ()

    def identified(self, key: str) -> None:
        """The caller has shown the key of this name; empty where none is needed."""
        if key:
            self._fields["key"] = key

    def checked(self, checked: CheckedRequest) -> None:
        """The request's values are in their limits."""
        self._checked = checked
        self._fields.update(
            request_id=checked.request_id,
            seed=checked.params.sampling.seed,
            choices=checked.params.answer.n,
        )
        structlog.contextvars.bind_contextvars(request_id=checked.request_id)
        if self._shared.log_text:
            self._fields["prompt"] = checked.prompt.text or checked.prompt.messages
        with self._metrics.faults:
            spans.describe(self._span, checked)

    def routed(self, target: str, num_prompt_tokens: int) -> None:
        """A target is asked, the first one or the next."""
        self._num_moves += 1
        self._num_prompt = num_prompt_tokens
        self._fields.update(target=target, moves=self._num_moves, prompt_tokens=num_prompt_tokens)

    def received(
        self, chunk: target_pb2.TokenChunk, responses: Iterable[pb.GenerateResponse]
    ) -> None:
        """A chunk came from the target, and these messages are made of it."""
        if self._ending is not None:
            return
        totals = self._metrics.totals
        if not self._begun:
            self._begun = True
            totals.prompt_tokens += self._num_prompt
        if chunk.cached_prompt_tokens and not self._num_cached:  # another target says so again
            self._num_cached = chunk.cached_prompt_tokens
            totals.cached_prompt_tokens += self._num_cached
        num_tokens = len(chunk.tokens)
        num_passed = sum(len(response.chunk.tokens) for response in responses)
        self._num_generated += num_tokens
        self._num_held += num_passed
        totals.generated_tokens += num_tokens
        totals.withheld_tokens += num_tokens - num_passed
        if chunk.index not in self._finish_reasons:
            self._stats[chunk.index] = chunk.speculation

    def sending(self, response: pb.GenerateResponse) -> None:
        """A message is about to go to the client."""
        if response.HasField("finish"):
            finish = response.finish
            self._finish_reasons[finish.index] = _REASONS.get(finish.reason, "stop")
            self._stats[finish.index] = finish.speculation
            return
        if response.chunk.tokens:
            self._last_token_s = time.perf_counter()
            if self._first_token_s is None:
                self._first_token_s = self._last_token_s
                with self._metrics.faults:
                    waited_s = self._first_token_s - self._started_s
                    self._metrics.time_to_first_token.observe(waited_s)
        if self._shared.log_text:
            self._texts.setdefault(response.chunk.index, []).append(response.chunk.text)

    def sent(self, response: pb.GenerateResponse) -> None:
        """It is on its way."""
        num_tokens = len(response.chunk.tokens)
        if self._ending is None and num_tokens:
            self._num_held -= num_tokens
            self._num_delivered += num_tokens
            self._metrics.totals.delivered_tokens += num_tokens

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """It is over; `error` is what ended it, None if everything was delivered."""
        if self._ending is not None:
            return
        self._ending = ending = self._judge(error)
        self._metrics.totals.withheld_tokens += self._num_held
        reasons = [self._finish_reasons[index] for index in sorted(self._finish_reasons)]
        self._metrics.ended(ending, "length" if "length" in reasons else "stop")
        seconds = time.perf_counter() - self._started_s
        with self._metrics.faults:
            self._observe(ending, seconds)
        facts = self._facts(reasons, seconds)
        with self._metrics.faults:
            self._write_line(ending, facts)
        with self._metrics.faults:
            spans.end(self._span, self._shared.model, ending, facts, self._caller, error)

    def _judge(self, error: BaseException | None) -> Ending:
        complete = (
            self._checked is not None and len(self._finish_reasons) == self._checked.params.answer.n
        )
        # A client that leaves behind the last message has its answer.
        if error is None or (complete and not isinstance(error, Exception)):
            return FINISHED
        deadline = Deadline(self._patience_s, self._caller.time_remaining())
        return judge(error, delivering=self._first_token_s is not None, deadline=deadline)

    def _observe(self, ending: Ending, seconds: float) -> None:
        if ending.outcome is not Outcome.REFUSED:
            self._metrics.request_duration.observe(seconds)
        num_tokens = self._num_delivered / max(1, len(self._finish_reasons))  # of a choice
        if ending is FINISHED and self._first_token_s is not None and num_tokens > 1:
            between_s = (self._last_token_s - self._first_token_s) / (num_tokens - 1)
            self._metrics.time_per_output_token.observe(between_s)

    def _facts(self, finish_reasons: list[str], seconds: float) -> dict[str, Any]:
        """What log line and span say alike."""
        first, stats = self._first_token_s, self._stats.values()
        return self._fields | {
            "cached_prompt_tokens": self._num_cached,
            "completion_tokens": self._num_delivered,
            "withheld_tokens": self._num_generated - self._num_delivered,
            "finish_reasons": finish_reasons,
            "rounds": sum(each.rounds for each in stats),
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
            "time_to_first_token_s": None if first is None else round(first - self._started_s, 4),
            "duration_s": round(seconds, 4),
        }

    def _write_line(self, ending: Ending, facts: dict[str, Any]) -> None:
        if self._shared.log_text:
            facts = facts | {"texts": ["".join(text) for _, text in sorted(self._texts.items())]}
        log.info(
            "request",
            outcome=ending.outcome.value,
            **({"code": ending.error_type, "error": ending.reason} if ending.error_type else {}),
            **facts,
            **log_ids(self._span),
        )
