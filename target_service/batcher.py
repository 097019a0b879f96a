"""The one loop: wait for drafts while it pays, plan, run on the device, commit.

Everything but the step itself happens on the event loop, between two steps. The device thread reads
the plan and the planned sequences' tokens, which nobody changes while it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from outrider.engine.batch import Batch
from outrider.engine.sampling import BadLogits
from outrider.engine.sequence import Sequence
from outrider.serving.device import DeviceStuck, DeviceThread
from outrider.serving.errors import EngineFailed, Overloaded, Unavailable
from target_service.counts import SpeculationCounts, Totals
from target_service.draft_gate import DraftGate
from target_service.draft_hub import DraftHub
from target_service.observer import Observer
from target_service.request import Piece, PromptToken, Reason, Request, Token
from target_service.scheduler import Plan, Planned, Scheduler
from target_service.verifier import Failure, Outcome, Verdict
from target_service.window import StepCost

log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 1.0
_MAX_FAILED_STEPS = 3
"""Steps in a row that failed for all who would have got a token, after which the engine counts as
dead: the fault is not the requests'. Else it would fail so fast that it drew everybody's."""


class Batcher:
    """Owns the requests from their admission to their end."""

    def __init__(
        self,
        scheduler: Scheduler,
        hub: DraftHub,
        run_step: Callable[[Plan], list[Outcome]],
        *,
        device: DeviceThread,
        cost: StepCost,
        wake: asyncio.Event,
        arrived: asyncio.Event,
        on_dead: Callable[[], None],
        observer: Observer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.totals = Totals()
        self.speculation = SpeculationCounts()
        self.dead_reason = ""
        self._run_step = run_step
        self._device = device
        self._cost = cost
        self._wake = wake
        self._gate = DraftGate(hub, arrived)
        self._on_dead = on_dead
        self._observer = observer or Observer()
        self._num_failed_steps = 0
        self.draining = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run steps."""
        self._task = asyncio.create_task(self._loop(), name="batcher")
        self._task.add_done_callback(self._note_end)

    @property
    def draft_wait_s(self) -> float:
        """Seconds that steps waited for drafts."""
        return self._gate.waited_s

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True

    async def stop(self) -> None:
        """End every request and the loop."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # it may have died before, and said why
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._fail(request, Unavailable("the target is shutting down"))

    def submit(self, *requests: Request) -> None:
        """Admit the choices of a request: all, or none and Unavailable or Overloaded is raised."""
        if self.dead_reason:
            raise EngineFailed(f"the engine is dead: {self.dead_reason}")
        if self.draining:
            raise Unavailable("the target is shutting down")
        if not self.scheduler.has_room_for(len(requests)):
            self.totals.refused += len(requests)
            waiting = len(self.scheduler.waiting)
            raise Overloaded(f"{waiting} requests are waiting already", _RETRY_AFTER_S)
        self.totals.started += len(requests)
        for request in requests:
            self.scheduler.add(request)
        self._wake.set()
        self._gate.nudge()

    def nudge(self) -> None:
        """A stream has room again, or something else has changed that a step depends on."""
        self._wake.set()

    def cancel(self, *requests: Request, failed: bool = False) -> None:
        """Nobody reads these any more: free everything now. Those that have ended stay as they are.

        `failed`: that is no wish of the client's.
        """
        for request in requests:
            if not request.ended:
                self.totals.failed += failed
                self.totals.cancelled += not failed
                self._end(request)

    async def _loop(self) -> None:
        while True:
            while not self.scheduler.has_work:
                self._wake.clear()
                await self._wake.wait()
            scheduler, gate = self.scheduler, self._gate
            waited_before = gate.waited_s
            await gate.wait(scheduler.running, scheduler.waiting)
            plan = scheduler.plan(gate.drafts_of, gate.sits_out)
            if not plan.shares and gate.anybody_sits_out:
                # Those in the waiting line have no room yet, so there is nobody to step instead.
                await gate.wait(scheduler.running, may_sit_out=False)
                plan = scheduler.plan(gate.drafts_of)
            if not plan.shares:
                # Everybody is paused or gone: whoever changes that sets the event.
                self._wake.clear()
                await self._wake.wait()
                continue
            self._observer.waited(gate.waited_s - waited_before)
            await self._step(plan)

    async def _step(self, plan: Plan) -> None:
        for i, share in enumerate(plan.shares):
            self._gate.open(share.request)
            if share.request.drafts is not None:
                tail = share.request.drafts.tail
                tail.begin_round(len(share.drafts))
                # A copy: the tail may lose its drafter while the step still runs.
                probs = tuple(tail.probs[: len(share.drafts)])
                plan.shares[i] = replace(share, draft_probs=probs)
        self._observer.begins(plan)
        try:
            verdicts = await self._run(plan)
        except DeviceStuck:
            raise  # nothing will ever run there again
        except Exception as error:
            log.error("a step failed", requests=len(plan.shares), exc_info=error)
            await self._step_one_by_one(plan, error)
            return
        if all(item.num_logits == len(item.token_ids) for item in plan.batch.items):
            self._cost.observe(plan.batch.num_tokens, self.totals.last_step_s)
        for share, item, verdict in zip(plan.shares, plan.batch.items, verdicts, strict=True):
            self._commit(share, item.end, verdict)
        self._note_step(verdicts)

    async def _step_one_by_one(self, plan: Plan, error: Exception) -> None:
        """Find out for whom a step fails, so that only they pay for it."""
        outcomes: list[Outcome] = []
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            if share.request.ended:
                continue
            alone = Plan(Batch([item]), [share])
            try:
                if len(plan.shares) == 1:
                    raise error
                verdict = (await self._run(alone))[0]
            except DeviceStuck:
                raise
            except Exception as reason:
                outcomes.append(Failure(reason))
                self._fail(share.request, EngineFailed(f"a step failed: {reason}"))
                continue
            outcomes.append(verdict)
            self._commit(share, item.end, verdict)
        self._note_step(outcomes)

    def _note_step(self, outcomes: list[Outcome]) -> None:
        """Raises EngineFailed when too many in a row gave only failures. One that gave nobody a
        token, but a piece of a prompt, says nothing of those that do."""
        if any(isinstance(each, Verdict) and each.tokens for each in outcomes):
            self._num_failed_steps = 0
            return
        failures = [each.error for each in outcomes if isinstance(each, Failure)]
        self._num_failed_steps += bool(failures)
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise EngineFailed(f"{self._num_failed_steps} steps failed in a row: {failures[0]}")

    async def _run(self, plan: Plan) -> list[Outcome]:
        started = time.monotonic()
        try:
            return await self._device.run(partial(self._run_step, plan))
        finally:
            self.totals.add_step(time.monotonic() - started)
            self._observer.ran(plan, self.totals.last_step_s)

    def _commit(self, share: Planned, end: int, verdict: Outcome) -> None:
        request = share.request
        if request.ended:
            return
        if isinstance(verdict, Failure):
            error = verdict.error
            # Where logits are bad is in the model, not in the code.
            trace = None if isinstance(error, BadLogits) else error
            log.error(
                "a request cannot go on",
                request_id=request.request_id,
                reason=str(error),
                exc_info=trace,
            )
            self._fail(request, EngineFailed(f"a step failed: {error}"))
            return
        sequence = request.sequence
        if verdict is not None:
            request.num_scored += len(verdict.prompt)
        if verdict is None or not verdict.tokens:
            self.totals.prefilled_tokens += _prompt_part(sequence, end)
            self.scheduler.commit(request, end)
            if request.drafts is not None:
                request.drafts.tail.advance(0, 0)
            if verdict is not None and verdict.prompt:
                self._deliver(request, [], None, verdict.prompt)
            return
        self.totals.prefilled_tokens += _prompt_part(sequence, sequence.num_tokens)
        tokens, reason = self._cut(request, verdict.tokens)
        accepted = min(verdict.num_accepted, len(tokens))
        # Drafts behind the stop were computed, but nobody asked for them.
        drafted = min(len(share.drafts), len(tokens)) if reason else len(share.drafts)
        self._observer.round(share, accepted)
        sequence.token_ids.extend(tokens)
        self.scheduler.commit(request, sequence.num_tokens - 1)
        for counts in (request.counts, self.speculation):
            counts.add_round(drafted, accepted)
        self.totals.generated_tokens += len(tokens)
        self._gate.advance(request, drafted, accepted, len(tokens))
        scores = verdict.logprobs
        made = [
            Token(token, drafted=i < accepted, logprobs=scores[i] if scores else None)
            for i, token in enumerate(tokens)
        ]
        if reason is not None:
            self.totals.finished += 1
            request.reason = reason
            self._end(request)
        # After the end, so that the last piece counts the drafts that it left unused.
        self._deliver(request, made, reason, verdict.prompt)

    def _deliver(
        self, request: Request, made: list[Token], reason: Reason | None, prompt: list[PromptToken]
    ) -> None:
        request.output.put(Piece(made, reason, request.speculation(), request.index, prompt))

    def _cut(self, request: Request, tokens: list[int]) -> tuple[list[int], Reason | None]:
        """The tokens up to the end, and why; a stop on the last allowed token is a stop."""
        length = request.sequence.num_tokens
        for index, token in enumerate(tokens):
            if token in request.stop_ids:
                return tokens[: index + 1], Reason.STOP
            if length + index + 1 >= request.max_len:
                return tokens[: index + 1], Reason.LENGTH
        return tokens, None

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.ended:
            self.totals.failed += 1
            self._end(request)
            request.output.fail(error)

    def _end(self, request: Request) -> None:
        request.ended, request.ended_s = True, time.monotonic()
        self.scheduler.remove(request)
        if request.drafts is not None:
            request.drafts.tail.finish()
        self._gate.forget(request)
        self._wake.set()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Without the loop nothing moves: say so to everybody."""
        if self._stopping:
            self.dead_reason = "stopped"
            return
        error = EngineFailed("its loop was cancelled") if task.cancelled() else task.exception()
        self.dead_reason = str(error) or type(error).__name__
        log.error("the engine is dead", reason=self.dead_reason, exc_info=error)
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._fail(request, EngineFailed(f"the engine is dead: {self.dead_reason}"))
        self._on_dead()


def _prompt_part(sequence: Sequence, end: int) -> int:
    """Of the tokens computed up to `end`, those of the prompt that were not computed before."""
    return max(0, min(end, sequence.prompt_len) - sequence.num_computed)
