"""The gateway's span of a request, in the words of OpenTelemetry's conventions for generative AI.

Own attributes begin with `outrider.`. Prompts, answers and stop strings are never in a span, and
its name holds the name of the served model only, whatever the client asked for.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.caller import Caller
from gateway.ending import Ending, Outcome
from gateway.requests import CheckedRequest
from outrider.serving.tracing import Tracing, remote_context
from protos.outrider.v1 import inference_pb2 as pb

_MAX_NAME = 80
_MAX_INT = 2**63 - 1
_FACTS = ("key", "target", "moves", "rounds", "drafted", "accepted", "time_to_first_token_s")
"""Of the record's, what is shown under our own names."""


def start(
    tracing: Tracing,
    served: str,
    request: pb.GenerateRequest | Exception,
    request_id: str,
    caller: Caller,
) -> Span:
    """The span of a request that has arrived; a child of the caller's, if that says so.

    request_id: empty if there is none yet.
    """
    attributes = caller.span_attributes() | {"gen_ai.provider.name": "outrider"}
    if request_id:
        attributes["outrider.request_id"] = request_id
    name = caller.name
    if isinstance(request, pb.GenerateRequest):
        operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
        model = request.model or served
        name = f"{operation} {served}" if model == served else operation
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model[:_MAX_NAME],
        }
    return tracing.tracer.start_span(
        name,
        context=remote_context(caller.headers()),
        kind=SpanKind.SERVER,
        attributes=attributes,
    )


def describe(span: Span, checked: CheckedRequest) -> None:
    """What the request asks for, defaults included."""
    if not span.is_recording():
        return
    sampling, stopping = checked.params.sampling, checked.params.stopping
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": checked.params.answer.n,
        "gen_ai.response.id": checked.request_id,
        "outrider.request_id": checked.request_id,
        "outrider.seed": str(sampling.seed),
    }
    if sampling.seed is not None and sampling.seed <= _MAX_INT:  # a span's integers have a sign
        attributes["gen_ai.request.seed"] = sampling.seed
    if stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = stopping.max_tokens
    span.set_attributes(attributes)


def end(
    span: Span,
    served: str,
    ending: Ending,
    facts: dict[str, Any],
    caller: Caller,
    error: BaseException | None,
) -> None:
    """The request is over, by `error` if there was one; `facts` are its record's."""
    if not span.is_recording():
        return
    try:
        of_the_door = caller.result_attributes(ending.code, error)
        span.set_attributes(of_the_door | _result(served, ending, facts))
        if ending.error_type and ending.outcome is not Outcome.CANCELLED:
            span.set_status(Status(StatusCode.ERROR, ending.reason))
    finally:
        span.end()


def _result(served: str, ending: Ending, facts: dict[str, Any]) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.model": served,
        "gen_ai.response.finish_reasons": facts["finish_reasons"],
        "gen_ai.usage.output_tokens": facts["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": facts["cached_prompt_tokens"],
        "outrider.outcome": ending.outcome.value,
    }
    if "prompt_tokens" in facts:
        attributes["gen_ai.usage.input_tokens"] = facts["prompt_tokens"]
    if ending.error_type:
        attributes["error.type"] = ending.error_type
    shown = {name: facts.get(name) for name in _FACTS}
    return attributes | {f"outrider.{name}": v for name, v in shown.items() if v is not None}
