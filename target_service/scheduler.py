"""Who runs in the next step, with how many tokens: pure policy over sequences and blocks.

Knows nothing of torch, asyncio or drafters. Sequences are served by counters: each has tokens that
are not computed yet, one for a running text, many for a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BlockPool
from outrider.engine.sparse_probs import SparseProbs
from target_service.request import Request

_AGEING_S = 1.0
"""Seconds in the waiting line that are worth one step of priority."""
_PROMPT_SHARE = 4
"""One part in this many of a step is kept from drafts while prompts are read."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request's share of a step."""

    request: Request
    drafts: list[int]
    num_prompt_rows: int = 0
    """Of the rows of logits, the first ones, which only say what the prompt's tokens are worth."""
    draft_probs: tuple[SparseProbs, ...] = ()
    """In rejection mode the distribution of each draft."""


@dataclass(slots=True)
class Plan:
    """One step: what runs on the device, and for whom."""

    batch: Batch = field(default_factory=Batch)
    shares: list[Planned] = field(default_factory=list)


class Scheduler:
    """Two lists and a pool. A request is in `waiting`, in `running`, or gone."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        step_tokens: int,
        max_waiting: int,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_sequences > step_tokens:
            raise ValueError(
                f"step_tokens ({step_tokens}) must be at least max_sequences ({max_sequences})"
            )
        self.pool = pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._num_arrivals = 0
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._max_waiting = max_waiting

    def has_room_for(self, num_requests: int) -> bool:
        """That many more may join the waiting line."""
        present = len(self.waiting) + len(self.running)
        return present + num_requests <= self._max_waiting + self._max_sequences

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return any(not request.output.full for request in [*self.running, *self.waiting])

    def add(self, request: Request) -> None:
        """Put a request into the waiting line."""
        request.submitted_s = self._clock()
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its blocks, wherever it is."""
        for line in (self.running, self.waiting):
            if request in line:
                line.remove(request)
        self._free(request)

    def plan(
        self,
        drafts_of: Callable[[Request], list[int]],
        sits_out: Callable[[Request], bool] = lambda request: False,
    ) -> Plan:
        """The next step. Running texts go first, then prompts in order of arrival."""
        self._admit()
        plan = Plan()
        ready = [each for each in self.running if not each.output.full and not sits_out(each)]
        ready.sort(key=lambda request: (request.sequence.num_pending > 1, request.arrival))
        singles = [request.sequence.num_pending == 1 for request in ready]
        unread = sum(request.sequence.num_pending for request in ready) - sum(singles)
        budget = self._step_tokens
        # A token is kept back for each text behind, and a share for prompts, so that drafts never
        # displace either.
        reserved = sum(singles)
        for_prompts = min(unread, self._step_tokens // _PROMPT_SHARE)
        for request, single in zip(ready, singles, strict=True):
            if request not in self.running:
                continue  # preempted for one before it
            reserved -= single
            room = budget - reserved
            if room <= 0:
                break
            drafts = drafts_of(request)[: max(0, room - 1 - for_prompts)] if single else []
            budget -= self._schedule(plan, request, drafts, room)
        return plan

    def commit(self, request: Request, num_computed: int) -> None:
        """After a step: the cache holds `num_computed` tokens, and blocks behind them are freed."""
        sequence = request.sequence
        num_named = sequence.num_computed // self.pool.block_size
        sequence.num_computed = num_computed
        keep = self.pool.blocks_for(sequence.num_tokens)
        if keep < len(sequence.block_table):
            self.pool.free(sequence.block_table[keep:])
            del sequence.block_table[keep:]
        if self._prefix_cache:
            # Only what is confirmed and complete gets a name: drafts that failed lie behind it.
            names = request.chain.names(sequence.token_ids, num_computed)
            for i in range(num_named, len(names)):
                self.pool.name(sequence.block_table[i], names[i])

    def check_integrity(self) -> list[str]:
        """What is wrong with the pool, given every sequence."""
        everyone = [*self.running, *self.waiting]
        return self.pool.check_integrity(request.sequence.block_table for request in everyone)

    def _admit(self) -> None:
        while True:
            able = [each for each in self.waiting if each.may_start and not each.output.full]
            if not able:
                return
            request = min(able, key=self._turn)
            cached = self._cached_blocks(request)
            if self._fits(request, cached):
                self.waiting.remove(request)
                self.running.append(request)
                self._start_behind(request, cached)
            elif self.running and all(each.output.full for each in self.running):
                self._preempt(min(self.running, key=_gives_way))
            else:
                return

    def _turn(self, request: Request) -> tuple[float, int]:
        """Smallest first. Waiting raises a priority, so that nobody waits for ever."""
        aged = request.priority + (self._clock() - request.submitted_s) / _AGEING_S
        return -aged, request.arrival

    def _cached_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the request's beginning; at least one token is left to compute."""
        if not self._prefix_cache:
            return []
        sequence = request.sequence
        return self.pool.find(request.chain.names(sequence.token_ids, request.num_cacheable))

    def _fits(self, request: Request, cached: list[int]) -> bool:
        """There is a place, and blocks beside those that the running ones will still take."""
        needed = self.pool.blocks_for(request.sequence.num_tokens + 1) - len(cached)
        free = self.pool.num_free - self.pool.num_cached_among(cached)
        return len(self.running) < self._max_sequences and needed + self._promised_blocks() <= free

    def _start_behind(self, request: Request, cached: list[int]) -> None:
        """Take the cached blocks as the request's own first ones."""
        sequence = request.sequence
        self.pool.share(cached)
        sequence.block_table[:] = cached
        sequence.num_computed = len(cached) * self.pool.block_size
        if request.num_cached is None:  # not when it comes back after a preemption
            request.num_cached = min(sequence.num_computed, sequence.prompt_len)
            self.num_cached_tokens += request.num_cached

    def _promised_blocks(self) -> int:
        return sum(self._missing_blocks(request) for request in self.running)

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
        end = start + len(pending)
        if drafts:
            drafts = drafts[: self._slots_for_drafts(request, end)]
        if not self._extend(request, end + len(drafts), plan):
            return 0
        tokens = pending + drafts
        num_choosing = 1 + len(drafts) if ends_prefix else 0
        num_prompt_rows = len(pending) - ends_prefix if request.scores_prompt else 0
        plan.shares.append(Planned(request, drafts, num_prompt_rows))
        plan.batch.items.append(
            BatchItem(
                token_ids=tokens,
                start=start,
                # A copy: a cancelled request gives its blocks back while the step still runs.
                block_table=list(sequence.block_table),
                num_logits=num_prompt_rows + num_choosing,
            )
        )
        return len(tokens)

    def _slots_for_drafts(self, request: Request, end: int) -> int:
        """Slots behind `end` that drafts may have: nobody else is to lack a block for them."""
        table, size = request.sequence.block_table, self.pool.block_size
        held = max(self.pool.blocks_for(end), len(table))
        promised = self._promised_blocks() - self._missing_blocks(request)
        spare = max(0, self.pool.num_free - promised - (held - len(table)))
        return (held + spare) * size - end

    def _extend(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Give the request blocks for `num_tokens`, at the cost of others; False if it gave way."""
        table = request.sequence.block_table
        needed = max(0, self.pool.blocks_for(num_tokens) - len(table))
        while needed > self.pool.num_free:
            planned = {share.request for share in plan.shares}
            others = [each for each in self.running if each not in planned]
            victim = min(others, key=_gives_way)
            self._preempt(victim)
            if victim is request:
                return False
        table.extend(self.pool.allocate(needed))
        return True

    def _preempt(self, request: Request) -> None:
        """Send a request back to wait, at the front; its tokens are computed again later."""
        self.running.remove(request)
        self._free(request)
        self.waiting.append(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _free(self, request: Request) -> None:
        sequence = request.sequence
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed = 0


def _gives_way(request: Request) -> tuple[bool, int, int]:
    """Smallest first: whose reader is behind, then the lowest priority, then the newest."""
    return (not request.output.full, request.priority, -request.arrival)
