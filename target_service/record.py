"""One request from its call to its end, however it ends: its log line and its spans.

    generate MODEL             the call, from its arrival to its last message
      queue                    until the first step
      prefill                  until the first token
      decode                   until the last token; a sample of the rounds as events

The parts are one set a choice, made at the end from the times that the engine noted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from outrider.params import MAX_REQUEST_ID_BYTES, InvalidParam
from outrider.serving import tracing
from outrider.serving.deadline import Deadline
from outrider.serving.errors import OutriderError
from outrider.serving.open_calls import SHUTTING_DOWN
from protos.outrider.v1 import target_pb2
from target_service.draft_tail import Unused
from target_service.observer import Observer
from target_service.request import Request
from target_service.scheduler import Planned

log = structlog.get_logger(__name__)

_FIRST_ROUNDS = 16
_EVERY_ROUND = 16
_MAX_EVENTS = 128
_LEFT = "cancelled"
"""The code of a client that left: no error of anybody's."""
_SPAN_FACTS = (
    *("time_to_first_token_s", "cached_prompt_tokens", "preemptions"),
    *("rounds", "drafted", "accepted"),
)


class Outcome(Enum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client left, or its deadline passed, or a gateway met a stop string."""
    REFUSED = "refused"
    """It never ran."""


class ChoiceTrace:
    """What a traced choice keeps for its spans: the first rounds, then one in sixteen."""

    def __init__(self, context: SpanContext) -> None:
        self.context = context
        self.rounds: list[tuple[int, dict[str, AttributeValue]]] = []
        """(Unix time in ns, attributes) of each event."""
        self._num_rounds = 0
        self._num_stale = 0

    def add_round(
        self, share: Planned, num_accepted: int, draft_wait_s: float, verify_s: float
    ) -> None:
        """A round whose tokens are not confirmed yet."""
        number = self._num_rounds
        self._num_rounds += 1
        if number >= _FIRST_ROUNDS and number % _EVERY_ROUND or len(self.rounds) >= _MAX_EVENTS:
            return
        event: dict[str, AttributeValue] = {
            "outrider.k": len(share.drafts),
            "outrider.accepted": num_accepted,
            "outrider.base_len": share.request.sequence.num_tokens,
            "outrider.draft_wait_ms": round(draft_wait_s * 1e3, 3),
            "outrider.verify_ms": round(verify_s * 1e3, 3),
        }
        drafts = share.request.drafts
        if drafts is not None:
            stale = drafts.tail.unused[Unused.STALE]
            event["outrider.stale"] = stale - self._num_stale  # since the event before
            self._num_stale = stale
            if drafts.client is not None:
                event["outrider.round_trip_ms"] = round(drafts.client.round_trip_s * 1e3, 3)
        self.rounds.append((time.time_ns(), event))


class RequestRecord:
    """Collects what is said of a request. `end` may be called many times; the first one counts."""

    def __init__(
        self, observer: Observer, model: str, message: target_pb2.TokenRequest, context: Any
    ) -> None:
        self.outcome: Outcome | None = None
        """Set at the end."""
        self._faults = observer.faults
        self._tracer = observer.tracing.tracer
        self._message = message
        self._request_id = message.request_id[:MAX_REQUEST_ID_BYTES]  # not checked yet
        self._call = context
        self._patience_s: float | None = context.time_remaining()
        self._choices: Sequence[Request] = ()
        self._span: Span = INVALID_SPAN
        self._started_s = time.monotonic()
        self._started_ns = time.time_ns()
        with self._faults:
            self._span = self._start_span(model)
            # Of the call's own task: whatever is logged on its way says whose it is.
            structlog.contextvars.bind_contextvars(
                request_id=self._request_id, **tracing.log_ids(self._span)
            )

    @property
    def traceparent(self) -> str:
        """What drafters are told, so that their spans become children of this one's."""
        return tracing.traceparent(self._span)

    def admitted(self, choices: Sequence[Request]) -> None:
        """These are in the waiting line now."""
        self._choices = choices
        if self._span.is_recording():
            for choice in choices:
                choice.trace = ChoiceTrace(self._span.get_span_context())

    def end(self, error: BaseException | None) -> None:
        """It is over; `error` is what ended it, None if everything was delivered."""
        if self.outcome is not None:
            return
        self.outcome, code, reason = self._judge(error)
        now, facts = time.monotonic(), self._facts()
        with self._faults:
            self._write_line(code, reason, facts, now)
        if self._span.is_recording():
            with self._faults:
                for choice in self._choices:
                    self._make_phase_spans(choice, now)
            with self._faults:
                self._end_span(code, reason, facts, now)

    def _judge(self, error: BaseException | None) -> tuple[Outcome, str, str]:
        """The outcome, the name of the gRPC code, and why; both are empty for OK."""
        if error is None:
            return Outcome.FINISHED, "", ""
        if isinstance(error, asyncio.CancelledError) and SHUTTING_DOWN not in error.args:
            if Deadline(self._patience_s, self._call.time_remaining()).passed:
                return Outcome.CANCELLED, "deadline_exceeded", "the client's deadline passed"
            return Outcome.CANCELLED, _LEFT, "the client left"
        # Who is closed in the middle of a message, and not cancelled, is closed by the shutdown.
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return Outcome.FAILED, "unavailable", SHUTTING_DOWN
        if isinstance(error, InvalidParam):
            return Outcome.REFUSED, "invalid_argument", str(error)
        if isinstance(error, OutriderError):
            outcome = Outcome.FAILED if self._choices else Outcome.REFUSED
            return outcome, error.code.name.lower(), str(error)
        return Outcome.FAILED, "internal", type(error).__name__

    def _start_span(self, model: str) -> Span:
        message = self._message
        return self._tracer.start_span(
            f"generate {model}",
            context=tracing.remote_context(self._call.invocation_metadata()),
            kind=SpanKind.SERVER,
            start_time=self._started_ns,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": "outrider.v1.Target/Generate",
                # The conventions' names for usage are the gateway's: who adds up a trace's spans
                # would count each token twice.
                "outrider.prompt_tokens": len(message.token_ids),
                "outrider.request_id": self._request_id,
            },
        )

    def _write_line(self, code: str, reason: str, facts: dict[str, Any], now: float) -> None:
        assert self.outcome is not None
        phases = _phases(self._choices[0], now) if self._choices else {}
        log.info(
            "request",
            request_id=self._request_id,
            outcome=self.outcome.value,
            **({"code": code, "error": reason} if code else {}),
            **facts,
            **{f"{name}_s": round(end - start, 4) for name, (start, end) in phases.items()},
            duration_s=round(now - self._started_s, 4),
            **tracing.log_ids(self._span),
        )

    def _facts(self) -> dict[str, Any]:
        """What was read and made."""
        choices = self._choices
        counts = [choice.counts for choice in choices]
        firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
        return {
            "time_to_first_token_s": round(min(firsts) - self._started_s, 4) if firsts else None,
            "choices": len(choices) or self._message.n or 1,
            "prompt_tokens": len(self._message.token_ids),
            "cached_prompt_tokens": (choices[0].num_cached or 0) if choices else 0,
            "generated_tokens": sum(choice.num_generated for choice in choices)
            - len(self._message.resumed_token_ids) * len(choices),
            "finish_reasons": [choice.reason.value for choice in choices if choice.reason],
            "rounds": sum(each.rounds for each in counts),
            "drafted": sum(each.drafted for each in counts),
            "accepted": sum(each.accepted for each in counts),
            "preemptions": sum(choice.num_preemptions for choice in choices),
        }

    def _end_span(self, code: str, reason: str, facts: dict[str, Any], now: float) -> None:
        assert self.outcome is not None
        attributes = {
            "outrider.outcome": self.outcome.value,
            "rpc.response.status_code": code.upper() or "OK",
            "outrider.generated_tokens": facts["generated_tokens"],
            "outrider.finish_reasons": facts["finish_reasons"],
            **{f"outrider.{name}": facts[name] for name in _SPAN_FACTS if facts[name] is not None},
        }
        if code:
            attributes["error.type"] = code
        self._span.set_attributes(attributes)
        if code and code != _LEFT:
            self._span.set_status(Status(StatusCode.ERROR, reason))
        self._span.end(self._unix_ns(now))

    def _make_phase_spans(self, choice: Request, now: float) -> None:
        for name, (start_s, end_s) in _phases(choice, now).items():
            span = self._tracer.start_span(
                name,
                context=tracing.child_context(self._span),
                attributes={"outrider.choice": choice.index},
                start_time=self._unix_ns(start_s),
            )
            if name == "decode" and choice.trace is not None:
                for when_ns, attributes in choice.trace.rounds:
                    span.add_event("round", attributes, when_ns)
            span.end(self._unix_ns(end_s))

    def _unix_ns(self, moment_s: float) -> int:
        return self._started_ns + int((moment_s - self._started_s) * 1e9)


def _phases(choice: Request, now: float) -> dict[str, tuple[float, float]]:
    """Beginning and end of each phase that has begun."""
    starts = {
        "queue": choice.submitted_s,
        "prefill": choice.scheduled_s,
        "decode": choice.first_token_s,
    }
    begun = [(name, start) for name, start in starts.items() if start is not None]
    ends = [*(start for _, start in begun[1:]), choice.ended_s or now]
    return {name: (start, end) for (name, start), end in zip(begun, ends, strict=True)}
