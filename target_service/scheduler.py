"""Who runs in the next step, with how many tokens: pure policy over sequences and blocks.

Knows nothing of torch, asyncio or drafters. Sequences are served by counters: each has tokens that
are not computed yet, one for a running text, many for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BlockPool, PoolExhausted
from target_service.request import Request


@dataclass(frozen=True, slots=True)
class Planned:
    """One request's share of a step."""

    request: Request
    drafts: list[int]


@dataclass(slots=True)
class Plan:
    """One step: what runs on the device, and for whom."""

    batch: Batch = field(default_factory=Batch)
    shares: list[Planned] = field(default_factory=list)


class Scheduler:
    """Two lists and a pool. A request is in `waiting`, in `running`, or gone."""

    def __init__(
        self, pool: BlockPool, *, max_sequences: int, step_tokens: int, max_waiting: int
    ) -> None:
        if max_sequences > step_tokens:
            raise ValueError(
                f"step_tokens ({step_tokens}) must be at least max_sequences ({max_sequences})"
            )
        self.pool = pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._max_waiting = max_waiting

    @property
    def has_room(self) -> bool:
        """Another request may join the waiting line."""
        present = len(self.waiting) + len(self.running)
        return present < self._max_waiting + self._max_sequences

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return any(not request.output.full for request in self.running) or bool(self.waiting)

    def add(self, request: Request) -> None:
        """Put a request into the waiting line."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its blocks, wherever it is."""
        for line in (self.running, self.waiting):
            if request in line:
                line.remove(request)
        self._free(request)

    def plan(self, drafts_of: Callable[[Request], list[int]]) -> Plan:
        """The next step. Running texts go first, then prompts in order of arrival."""
        self._admit()
        plan = Plan()
        ready = [request for request in self.running if not request.output.full]
        ready.sort(key=lambda request: (request.sequence.num_pending > 1, request.arrival))
        budget = self._step_tokens
        # A token is kept back for each text behind, so that drafts never displace it.
        reserved = sum(request.sequence.num_pending == 1 for request in ready)
        for request in ready:
            if request not in self.running:
                continue  # preempted for one before it
            single = request.sequence.num_pending == 1
            reserved -= single
            if budget - reserved <= 0:
                break
            drafts = drafts_of(request) if single else []
            budget -= self._schedule(plan, request, drafts, budget - reserved)
        return plan

    def commit(self, request: Request, num_computed: int) -> None:
        """After a step: the cache holds `num_computed` tokens, and blocks behind them are freed."""
        sequence = request.sequence
        sequence.num_computed = num_computed
        keep = self.pool.blocks_for(sequence.num_tokens)
        if keep < len(sequence.block_table):
            self.pool.free(sequence.block_table[keep:])
            del sequence.block_table[keep:]

    def check_integrity(self) -> list[str]:
        """What is wrong with the pool, given every sequence."""
        everyone = [*self.running, *self.waiting]
        return self.pool.check_integrity(request.sequence.block_table for request in everyone)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sequences:
            request = min(self.waiting, key=lambda each: (-each.priority, each.arrival))
            needed = self.pool.blocks_for(request.sequence.num_tokens + 1)
            promised = sum(self._missing_blocks(each) for each in self.running)
            if needed > self.pool.num_free - promised:
                return
            self.waiting.remove(request)
            self.running.append(request)

    def _missing_blocks(self, request: Request) -> int:
        """Blocks that a running sequence will still take for the tokens that it already has."""
        sequence = request.sequence
        return self.pool.blocks_for(sequence.num_tokens + 1) - len(sequence.block_table)

    def _schedule(self, plan: Plan, request: Request, drafts: list[int], budget: int) -> int:
        """Add the request's share to the plan; the tokens it takes, or 0 if there are no blocks."""
        sequence = request.sequence
        start = sequence.num_computed
        pending = sequence.token_ids[start : start + budget]
        ends_prefix = len(pending) == sequence.num_pending
        drafts = drafts[: budget - len(pending)] if ends_prefix else []
        if not self._extend(request, start + len(pending) + len(drafts), plan):
            drafts = []
            if not self._extend(request, start + len(pending), plan, preempt=True):
                return 0
        tokens = pending + drafts
        plan.shares.append(Planned(request, drafts))
        plan.batch.items.append(
            BatchItem(
                token_ids=tokens,
                start=start,
                # A copy: a cancelled request gives its blocks back while the step still runs.
                block_table=list(sequence.block_table),
                num_logits=1 + len(drafts) if ends_prefix else 0,
            )
        )
        return len(tokens)

    def _extend(
        self, request: Request, num_tokens: int, plan: Plan, *, preempt: bool = False
    ) -> bool:
        """Give the request blocks for `num_tokens`, at the cost of newer ones if `preempt`."""
        table = request.sequence.block_table
        needed = self.pool.blocks_for(num_tokens) - len(table)
        while needed > self.pool.num_free:
            if not preempt or not self._preempt_for(request, plan):
                return False
        try:
            table.extend(self.pool.allocate(max(0, needed)))
        except PoolExhausted:
            return False
        return True

    def _preempt_for(self, request: Request, plan: Plan) -> bool:
        """Send the newest request of the lowest priority back to wait; False if that is `request`.

        It keeps its tokens and computes them again later.
        """
        planned = {share.request for share in plan.shares}
        others = [each for each in self.running if each not in planned]
        victim = min(others, key=lambda each: (each.priority, -each.arrival))
        self.running.remove(victim)
        self._free(victim)
        self.waiting.append(victim)  # its early arrival puts it at the front
        self.num_preemptions += 1
        return victim is not request

    def _free(self, request: Request) -> None:
        sequence = request.sequence
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed = 0
