"""What the target says of its pool: the truth, at a price that does not hold steps up."""

from __future__ import annotations

from types import SimpleNamespace

from outrider.engine.block_pool import BlockPool
from target_service.request import Request
from target_service.scheduler import Scheduler
from target_service.status import StatusReporter, wasted_slots
from tests.support.target_parts import make_request


def make_scheduler() -> Scheduler:
    """Blocks of 16 tokens."""
    return Scheduler(BlockPool(32), max_sequences=4, step_tokens=64, max_waiting=4)


def step(scheduler: Scheduler) -> None:
    """Everybody gets what is planned; who has read the prompt gets one more token."""
    plan = scheduler.plan(lambda request: [])
    for share, item in zip(plan.shares, plan.batch.items, strict=True):
        if item.num_logits:
            share.request.sequence.token_ids.append(2)
        scheduler.commit(share.request, item.end)


def run(scheduler: Scheduler, prompt: list[int]) -> Request:
    """A request with its prompt read and one token made."""
    request = make_request(prompt, 50)
    scheduler.add(request)
    step(scheduler)
    return request


def test_shared_blocks_waste_nothing() -> None:
    """Only what is empty behind the last token counts, however many share the beginning."""
    scheduler = make_scheduler()
    run(scheduler, [1] * 40)
    assert wasted_slots(scheduler) == 8
    run(scheduler, [1] * 40)
    # The one has 41 tokens by now; the other shares two of its blocks and has 40.
    assert scheduler.pool.num_used == 4
    assert wasted_slots(scheduler) == 7 + 8


def test_the_pool_is_checked_now_and_then_while_requests_run() -> None:
    """A large one takes as long as a step. With nothing running every answer is of that moment."""
    scheduler, now = make_scheduler(), [100.0]
    batcher = SimpleNamespace(scheduler=scheduler)
    identity = SimpleNamespace(kv_dtype="int8", block_bytes=4096)
    status = StatusReporter(identity, None, None, batcher, None, None, 0, lambda: now[0])
    (leaked,) = scheduler.pool.allocate(1)
    assert len(status._pool().integrity_errors) == 1
    scheduler.pool.free([leaked])
    assert list(status._pool().integrity_errors) == []
    request = run(scheduler, [1, 2, 3])
    (leaked,) = scheduler.pool.allocate(1)
    now[0] += 5
    assert list(status._pool().integrity_errors) == []
    now[0] += 5
    assert len(status._pool().integrity_errors) == 1
    scheduler.pool.free([leaked])
    assert len(status._pool().integrity_errors) == 1
    scheduler.remove(request)
    assert list(status._pool().integrity_errors) == []
