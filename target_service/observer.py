"""What the engine tells while it runs: distributions, rounds of traced requests, spans of steps.

Every call is immediate, and none of them raises: a fault in here is counted and said once, and the
step goes on. What the engine counts anyway is not told again, but read when somebody asks.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import Link
from prometheus_client import CollectorRegistry, Histogram

from outrider.serving.faults import Faults
from outrider.serving.metrics import SECONDS_BUCKETS, TOKENS_BUCKETS
from outrider.serving.tracing import Tracing
from target_service.scheduler import Plan, Planned

_SHORT_BUCKETS = (0.0001, 0.00025, 0.0005, *SECONDS_BUCKETS)
"""For what can be over in less than a millisecond."""
_K_BUCKETS = (*map(float, range(9)), 12.0, 16.0, 24.0, 32.0, 64.0)
"""Each k up to the usual limit apart, and none at all from one."""
_LOOKING_S = 0.0005
"""What a step takes to see that it need not wait for drafts."""


class Observer:
    """Told by the batcher and by the connections to drafters."""

    def __init__(
        self, registry: CollectorRegistry | None = None, tracing: Tracing | None = None
    ) -> None:
        """registry: where the distributions are shown; None for nowhere."""
        self.faults = Faults()
        self.tracing = tracing or Tracing.disabled()
        self._wait_s = 0.0
        self._step_s = 0.0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=registry)

        self._queue = histogram(
            "queue_seconds", "From joining the waiting line to the first step.", SECONDS_BUCKETS
        )
        self._prefill = histogram(
            "prefill_seconds", "From the first step to the first token.", SECONDS_BUCKETS
        )
        self._step = histogram("step_seconds", "One step on the device.", _SHORT_BUCKETS)
        self._batch_tokens = histogram(
            "batch_tokens", "Tokens that a step forwards, drafts included.", TOKENS_BUCKETS
        )
        self._batch_sequences = histogram(
            "batch_sequences", "Sequences that share a step.", TOKENS_BUCKETS
        )
        self._draft_wait = histogram(
            "draft_wait_seconds", "Wait for drafts, of steps that waited.", _SHORT_BUCKETS
        )
        self._round_trip = histogram(
            "draft_round_trip_seconds",
            "From an update to the proposal behind it, less the drafter's own time.",
            _SHORT_BUCKETS,
        )
        self._window = histogram(
            "window_tokens", "How far an update lets the drafter run ahead.", TOKENS_BUCKETS
        )
        self._round_drafts = histogram(
            "round_draft_tokens", "Drafts in a round, rounds without any included.", _K_BUCKETS
        )

    def waited(self, seconds: float) -> None:
        """The next step had to wait that long for drafts, or only looked."""
        with self.faults:
            self._wait_s = seconds
            if seconds > _LOOKING_S:
                self._draft_wait.observe(seconds)

    def begins(self, plan: Plan) -> None:
        """A step begins."""
        with self.faults:
            now = time.monotonic()
            for share in plan.shares:
                if share.request.scheduled_s is None:
                    share.request.scheduled_s = now
                    self._queue.observe(now - share.request.submitted_s)

    def ran(self, plan: Plan, seconds: float) -> None:
        """A step is over, with a result or without."""
        with self.faults:
            self._step_s = seconds
            self._step.observe(seconds)
            self._batch_tokens.observe(plan.batch.num_tokens)
            self._batch_sequences.observe(len(plan.shares))
            if self.tracing.step_spans:
                self._make_step_span(plan, seconds)

    def round(self, share: Planned, num_accepted: int) -> None:
        """The share's new tokens are known and are about to be confirmed."""
        with self.faults:
            request = share.request
            if request.first_token_s is None:
                request.first_token_s = now = time.monotonic()
                if request.scheduled_s is not None:
                    self._prefill.observe(now - request.scheduled_s)
                return
            self._round_drafts.observe(len(share.drafts))
            if request.trace is not None:
                request.trace.add_round(share, num_accepted, self._wait_s, self._step_s)

    def round_trip(self, seconds: float) -> None:
        """A drafter has answered an update."""
        with self.faults:
            self._round_trip.observe(seconds)

    def window(self, num_tokens: int) -> None:
        """An update is on its way to a drafter."""
        with self.faults:
            self._window.observe(num_tokens)

    def _make_step_span(self, plan: Plan, seconds: float) -> None:
        """A trace of its own: a step belongs to all its requests and to none of them."""
        traces = [share.request.trace for share in plan.shares]
        links = [Link(trace.context) for trace in traces if trace is not None]
        if not links:
            return
        end_ns = time.time_ns()
        span = self.tracing.tracer.start_span(
            "step",
            context=Context(),
            links=links,
            attributes={
                "outrider.tokens": plan.batch.num_tokens,
                "outrider.sequences": len(plan.shares),
            },
            start_time=end_ns - int(seconds * 1e9),
        )
        span.end(end_ns)
