"""The target's metrics: everything that it counts anyway, read at the moment of a scrape.

A scrape runs on the event loop between two steps, so what belongs together adds up: started is
finished, failed, cancelled, running and waiting. Distributions are the `Observer`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from outrider.serving.energy import EnergyMeter
from outrider.serving.metrics import Snapshot, counter, counters, gauge, gauges
from target_service.batcher import Batcher
from target_service.draft_client import FRAME_KINDS
from target_service.draft_hub import DraftHub
from target_service.draft_tail import Arrival, DraftTotals, Unused
from target_service.observer import Observer
from target_service.status import drafter_state, wasted_slots

_DRAFTER_STATES = ("ready", "silent", "connecting", "backoff", "refused")


class TargetMetrics:
    """Reads the parts of a target, as soon as there are any; changes nothing."""

    def __init__(
        self,
        registry: CollectorRegistry,
        observer: Observer,
        max_draft_tokens: int,
        device: str = "cpu",
    ) -> None:
        self._observer = observer
        self._max_draft_tokens = max_draft_tokens
        # Beside a GPU the processors' part would pass for the whole.
        self._energy = EnergyMeter() if device == "cpu" else None
        self._parts: tuple[Batcher, DraftHub, DraftTotals] | None = None
        registry.register(Snapshot(self._families))  # which asks at once what there is

    def attach(self, batcher: Batcher, hub: DraftHub, drafts: DraftTotals) -> None:
        """The target is there."""
        self._parts = batcher, hub, drafts

    def _families(self) -> Iterator[Metric]:
        """All that is known at this moment; little before the model is loaded."""
        up = self._parts is not None and not self._parts[0].dead_reason
        yield gauge("engine_up", "1 while the engine can run steps.", up)
        yield counter(
            "telemetry_errors", "Errors of logs, traces and metrics.", self._observer.faults.count
        )
        joules = self._energy.joules() if self._energy else None
        if joules is not None:
            yield counter("energy_joules", "Energy that this machine's processors took.", joules)
        if self._parts is not None:
            batcher, hub, drafts = self._parts
            yield from _requests(batcher)
            yield from _steps(batcher)
            yield from _pool(batcher)
            yield from _speculation(batcher, self._max_draft_tokens)
            yield from _drafts(hub, drafts)


def _requests(batcher: Batcher) -> Iterator[Metric]:
    totals, scheduler = batcher.totals, batcher.scheduler
    yield counter("requests_started", "Requests taken in, each choice as one.", totals.started)
    yield counters(
        "requests",
        "Requests that ended, by how.",
        "outcome",
        {"finished": totals.finished, "failed": totals.failed, "cancelled": totals.cancelled},
    )
    yield counter("requests_refused", "Requests that found the waiting line full.", totals.refused)
    yield gauge("requests_running", "Requests in the batch.", len(scheduler.running))
    yield gauge("requests_waiting", "Requests in the waiting line.", len(scheduler.waiting))
    yield counters(
        "tokens",
        "Tokens computed, found in the prefix cache, and generated.",
        "kind",
        {
            "prefilled": totals.prefilled_tokens,
            "cached_prompt": scheduler.num_cached_tokens,
            "generated": totals.generated_tokens,
        },
    )


def _steps(batcher: Batcher) -> Iterator[Metric]:
    totals = batcher.totals
    yield counter("busy_seconds", "Seconds that the device worked on steps.", totals.busy_s)
    yield counter(
        "preemptions",
        "Times a sequence gave its blocks back to go on later.",
        batcher.scheduler.num_preemptions,
    )
    if totals.last_step_time:
        yield gauge(
            "engine_last_step_timestamp_seconds",
            "When the last step ended, in Unix time.",
            totals.last_step_time,
        )


def _pool(batcher: Batcher) -> Iterator[Metric]:
    pool = batcher.scheduler.pool
    yield gauges(
        "kv_blocks",
        "Blocks of the paged cache.",
        "state",
        {"free": pool.num_free, "used": pool.num_used},
    )
    yield gauge("kv_pool_blocks", "Blocks of the paged cache in all.", pool.num_blocks)
    yield gauge("kv_block_slots", "Tokens that a block holds.", pool.block_size)
    yield gauge(
        "kv_wasted_slots",
        "Slots in used blocks that hold no token.",
        wasted_slots(batcher.scheduler),
    )


def _speculation(batcher: Batcher, max_draft_tokens: int) -> Iterator[Metric]:
    counts = batcher.speculation
    yield counter("spec_decode_num_drafts", "Verifications with at least one draft.", counts.rounds)
    yield counter(
        "spec_decode_num_draft_tokens", "Drafts verified, up to the stop.", counts.drafted
    )
    yield counter("spec_decode_num_accepted_tokens", "Drafts that stood.", counts.accepted)
    missing = [0] * (max_draft_tokens - len(counts.accepted_per_position))
    yield counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that stood, by their place in the round.",
        "position",
        {str(i): n for i, n in enumerate([*counts.accepted_per_position, *missing])},
    )


def _drafts(hub: DraftHub, drafts: DraftTotals) -> Iterator[Metric]:
    yield counter("draft_proposed_tokens", "Tokens that drafters proposed.", drafts.num_proposed)
    yield counters(
        "draft_unused",
        "Proposed tokens that no step verified, by reason.",
        "reason",
        {reason.value: drafts.unused[reason] for reason in Unused},
    )
    arrivals = {arrival.value: drafts.arrivals[arrival] for arrival in Arrival}
    frames = hub.frames
    yield counters(
        "draft_frames",
        "Proposals and other frames, by what became of them.",
        "arrival",
        arrivals | {kind: frames[kind] for kind in FRAME_KINDS},
    )
    states = Counter(drafter_state(client) for client in hub.clients)
    yield gauges(
        "drafters",
        "Drafter addresses, by what the target thinks of them.",
        "state",
        {state: states[state] for state in _DRAFTER_STATES},
    )
    yield counter(
        "drafter_connect_attempts", "Attempts to connect to a drafter.", hub.connect_attempts
    )
