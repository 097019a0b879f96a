"""The three services in the test's event loop, all of them traced, and what their spans must be."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from draft_service.service import DraftService
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Gateway, gateway_on
from tests.support.in_process import HOST, Target, running_target
from tests.support.otlp import Seen, Spans
from tests.support.token_requests import wait_for_drafters

ENDED_S = 2.0
"""Within which the spans of a request that is over have ended."""

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chain:
    """One request's spans, one a service; None where it never came."""

    gateway: Seen
    target: Seen | None
    draft: Seen | None


@dataclass(frozen=True)
class TracedStack:
    """A ready gateway, its target, that one's drafter, and where their spans go."""

    gateway: Gateway
    target: Target
    drafter: DraftService
    spans: Spans

    async def wait_ended(self, timeout_s: float = ENDED_S) -> None:
        """Until no request runs at the gateway, and every span that was started has ended."""
        totals, spans = self.gateway.service._metrics.totals, self.spans
        await spans.wait(
            lambda: not totals.running and spans.num_started == len(spans.all), timeout_s
        )


@contextlib.asynccontextmanager
async def traced_stack(
    model: Path,
    *,
    traced: bool = True,
    step_spans: bool = False,
    gateway: dict[str, object] | None = None,
    **target_settings: object,
) -> AsyncIterator[TracedStack]:
    """With an n-gram drafter that has shaken hands. traced: False for the same without tracing."""
    spans = Spans()
    tracing = {
        service: spans.tracing(service, step_spans=step_spans) if traced else None
        for service in ("gateway", "target", "draft")
    }
    drafter = DraftService(DraftSettings(port=0), tracing=tracing["draft"])
    async with (
        listening(drafter, HOST, 0) as draft,
        running_target(
            model, f"{HOST}:{draft.port}", tracing=tracing["target"], **target_settings
        ) as target,
        gateway_on(model, [target.address], tracing=tracing["gateway"], **gateway or {}) as front,
    ):
        await front.wait_health(True)
        await wait_for_drafters(target)
        yield TracedStack(front, target, drafter, spans)


def chat_request(text: str, max_tokens: int, k: int = 4, **fields: object) -> pb.GenerateRequest:
    """A greedy chat that ends at its cap, with exactly k drafts a round where there are any."""
    speculation = sampling_pb2.SpeculationParams(
        mode=sampling_pb2.SpeculationParams.MODE_FIXED, max_draft_tokens=k
    )
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        speculation=speculation,
        **fields,
    )


async def read_all(
    gateway: Gateway, request: pb.GenerateRequest, metadata: Metadata = (), timeout_s: float = 60
) -> int:
    """The tokens of an answer that was read to its end."""
    call = gateway.stub.Generate(request, metadata=tuple(metadata), timeout=timeout_s)
    count = 0
    async for response in call:
        count += len(response.chunk.tokens)
    assert await call.code() is grpc.StatusCode.OK
    return count


def chain_under(spans: Spans, gateway: Seen) -> Chain:
    """What hangs under a gateway's span: at most one span a service, and nothing astray."""
    targets = [span for span in spans.of("target", "generate") if _under(span, gateway)]
    assert len(targets) <= 1
    drafts = [span for span in spans.of("draft") if targets and _under(span, targets[0])]
    assert len(drafts) <= 1
    trace = spans.trace(gateway.trace_id)
    assert [span for span in trace if span.service == "gateway"] == [gateway]
    assert [span for span in trace if span.name.startswith("generate")] == targets
    assert [span for span in trace if span.service == "draft"] == drafts
    for draft in drafts:
        assert draft.links == [(targets[0].trace_id, targets[0].span_id)]
    target = targets[0] if targets else None
    return Chain(gateway, target, drafts[0] if drafts else None)


def assert_whole(chain: Chain) -> None:
    """All three services took part, each within the one above it."""
    assert chain.target is not None and chain.draft is not None
    assert chain.gateway.start_ns <= chain.target.start_ns <= chain.draft.start_ns
    assert chain.target.end_ns <= chain.gateway.end_ns


def _under(span: Seen, parent: Seen) -> bool:
    return (span.trace_id, span.parent_span_id) == (parent.trace_id, parent.span_id)
