"""What the target says of itself: one answer put together from the parts that count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.config import ModelConfig
from protos.outrider.v1 import target_pb2
from target_service.admission import Limits
from target_service.batcher import Batcher
from target_service.draft_client import DraftClient
from target_service.draft_hub import DraftHub
from target_service.draft_tail import DraftTotals
from target_service.scheduler import Scheduler

_CHECK_EVERY_S = 10.0
"""A check of a large pool takes as long as a step, and every gateway asks once a second."""


@dataclass(frozen=True)
class Identity:
    """What does not change while the process lives."""

    model_name: str
    instance_id: str
    token_table_hash: bytes
    weights_fingerprint: str
    numerics_id: str
    precision: str
    """Of its weights: a setting's dtype, never "auto", or "int8+int4" where matrices differ."""
    kv_dtype: str
    """Of keys and values in the cache: "float32", "bfloat16" or "int8"."""
    block_bytes: int
    """Memory of a block of the cache, in all layers."""


def wasted_slots(scheduler: Scheduler) -> int:
    """Slots in used blocks that hold no token. Shared blocks are full, so they add none."""
    tables = [(each.sequence, len(each.sequence.block_table)) for each in scheduler.running]
    size = scheduler.pool.block_size
    return sum(num_blocks * size - sequence.num_computed for sequence, num_blocks in tables)


def drafter_state(client: DraftClient) -> str:
    """What the connection says of itself, or "silent" when the drafter owes answers."""
    return client.state if client.responsive or not client.ready else "silent"


class StatusReporter:
    """Reads the counters; changes nothing."""

    def __init__(
        self,
        identity: Identity,
        model: ModelConfig,
        limits: Limits,
        batcher: Batcher,
        hub: DraftHub,
        drafts: DraftTotals,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._model = model
        self._limits = limits
        self._batcher = batcher
        self._hub = hub
        self._drafts = drafts
        self._max_waiting = max_waiting
        self._clock = clock
        self._checked_s = -math.inf
        self._integrity_errors: list[str] = []

    def report(self) -> target_pb2.TargetGetStatusResponse:
        """The state of this moment."""
        identity = self._identity
        return target_pb2.TargetGetStatusResponse(
            model=identity.model_name,
            token_table_hash=identity.token_table_hash,
            weights_fingerprint=identity.weights_fingerprint,
            numerics_id=identity.numerics_id,
            precision=identity.precision,
            vocab_size=self._model.vocab_size,
            max_model_len=self._limits.max_model_len,
            max_draft_tokens=self._limits.max_draft_tokens,
            state=self._state(),
            load=self._load(),
            pool=self._pool(),
            drafters=self._drafters(),
            speculation=self._speculation(),
            instance_id=identity.instance_id,
            eos_token_ids=self._model.eos_token_ids,
            max_waiting=self._max_waiting,
        )

    def _state(self) -> str:
        if self._batcher.dead_reason:
            return "dead"
        if self._batcher.draining:
            return "draining"
        return "serving" if all(each.responsive for each in self._hub.clients) else "degraded"

    def _load(self) -> target_pb2.TargetLoad:
        totals, scheduler = self._batcher.totals, self._batcher.scheduler
        return target_pb2.TargetLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            started=totals.started,
            finished=totals.finished,
            failed=totals.failed,
            cancelled=totals.cancelled,
            refused=totals.refused,
            steps=totals.steps,
            generated_tokens=totals.generated_tokens,
            preemptions=scheduler.num_preemptions,
            last_step_s=totals.last_step_s,
            prefilled_tokens=totals.prefilled_tokens,
        )

    def _pool(self) -> target_pb2.BlockPoolStatus:
        scheduler = self._batcher.scheduler
        pool = scheduler.pool
        return target_pb2.BlockPoolStatus(
            total=pool.num_blocks,
            free=pool.num_free,
            used=pool.num_used,
            block_size=pool.block_size,
            integrity_errors=self._check_integrity(),
            wasted_slots=wasted_slots(scheduler),
            kv_dtype=self._identity.kv_dtype,
            block_bytes=self._identity.block_bytes,
        )

    def _check_integrity(self) -> list[str]:
        """Of this moment while nothing runs, else at most `_CHECK_EVERY_S` old."""
        scheduler, now = self._batcher.scheduler, self._clock()
        if not scheduler.running or now - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s, self._integrity_errors = now, scheduler.check_integrity()
        return self._integrity_errors

    def _drafters(self) -> list[target_pb2.DrafterStatus]:
        return [
            target_pb2.DrafterStatus(
                address=client.address,
                state=drafter_state(client),
                reason=client.reason,
                instance_id=client.peer.instance_id,
                sequences=client.num_sequences,
                connect_attempts=client.connect_attempts,
                round_trip_s=client.round_trip_s,
                weights_fingerprint=client.peer.weights_fingerprint,
                load=client.load,
            )
            for client in self._hub.clients
        ]

    def _speculation(self) -> target_pb2.SpeculationTotals:
        counts, drafts = self._batcher.speculation, self._drafts
        frames = {arrival.value: count for arrival, count in drafts.arrivals.items()}
        return target_pb2.SpeculationTotals(
            rounds=counts.rounds,
            proposed=drafts.num_proposed,
            drafted=counts.drafted,
            accepted=counts.accepted,
            accepted_per_position=counts.accepted_per_position,
            unused={reason.value: count for reason, count in drafts.unused.items()},
            frames=frames | dict(self._hub.frames),
            wait_s=self._batcher.draft_wait_s,
        )
