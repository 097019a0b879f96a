"""The target's engine without a service around it: admit, plan, run, commit, in one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.block_pool import BLOCK_SIZE, BlockPool
from outrider.engine.runner import Runner
from protos.outrider.v1 import sampling_pb2, target_pb2
from target_service.admission import Door, Limits
from target_service.draft_tail import DraftTotals
from target_service.request import Piece, Request
from target_service.scheduler import Scheduler
from target_service.verifier import Failure, Verifier
from target_service.window import StepCost

Job = tuple[list[int], int]
"""A prompt and how many tokens to make."""


@dataclass
class Sink:
    """Takes tokens and forgets them."""

    full: bool = False

    def put(self, piece: Piece) -> None:
        """Nothing to do."""

    def fail(self, error: Exception) -> None:
        """A run with an error is no measurement."""
        raise error


class EngineLoop:
    """Greedy answers without drafts, each to its own length."""

    def __init__(self, runner: Runner, max_requests: int) -> None:
        config = runner.model.config
        limits = Limits(config.max_model_len, BLOCK_SIZE, max_requests, 0, 0, 0.0)
        self._door = Door(config, limits, StepCost(), DraftTotals())
        self._verifier = Verifier(runner)
        self._num_blocks = runner.cache.num_blocks

    def admit(self, jobs: Sequence[Job]) -> list[Request]:
        """Fresh requests."""
        made = []
        for prompt, max_tokens in jobs:
            message = target_pb2.TokenRequest(
                token_ids=prompt,
                sampling=sampling_pb2.SamplingParams(temperature=0.0),
                stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
                speculation=sampling_pb2.SpeculationParams(
                    mode=sampling_pb2.SpeculationParams.MODE_OFF
                ),
            )
            made += self._door.admit(message, self._door.check(message), Sink())
        return made

    def scheduler(self, requests: Sequence[Request], places: int, step_tokens: int) -> Scheduler:
        """A fresh one over the whole cache, with these requests in its waiting line."""
        scheduler = Scheduler(
            BlockPool(self._num_blocks, BLOCK_SIZE),
            max_sequences=places,
            step_tokens=step_tokens,
            max_waiting=len(requests),
            prefix_cache=False,
        )
        for request in requests:
            scheduler.add(request)
        return scheduler

    def step(self, scheduler: Scheduler) -> int:
        """One step; how many tokens it made."""
        plan = scheduler.plan(lambda request: [])
        outcomes = self._verifier.run(plan)
        num_tokens = 0
        for share, item, outcome in zip(plan.shares, plan.batch.items, outcomes, strict=True):
            sequence = share.request.sequence
            if outcome is None:
                scheduler.commit(share.request, item.end)
                continue
            assert not isinstance(outcome, Failure), outcome
            sequence.token_ids.extend(outcome.tokens)
            num_tokens += len(outcome.tokens)
            scheduler.commit(share.request, sequence.num_tokens - 1)
            if sequence.num_tokens >= share.request.max_len:
                scheduler.remove(share.request)
        return num_tokens
