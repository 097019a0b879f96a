"""The scheduler under any load: what it promises after each single step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.block_pool import BlockPool
from target_service.request import Request
from target_service.scheduler import Plan, Scheduler
from tests.support.target_parts import CollectedOutput, make_request

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int, max_sequences: int = 8, step_tokens: int = 32) -> Scheduler:
    """A scheduler with small blocks, so that they are crossed often."""
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        max_waiting=1000,
    )


@dataclass
class Job:
    """One request of a simulated load."""

    arrives: int  # step
    prompt_len: int
    max_tokens: int
    draft_len: int
    priority: int
    cancelled_after: int | None  # steps since its arrival
    paused: tuple[int, int]  # from and until, steps since its arrival
    request: Request | None = None

    @property
    def output(self) -> CollectedOutput:
        """Where its tokens go."""
        assert self.request is not None
        assert isinstance(self.request.output, CollectedOutput)
        return self.request.output


class Load:
    """Runs jobs through a scheduler with a model that takes no time, and checks every step."""

    def __init__(self, scheduler: Scheduler, step_tokens: int, jobs: list[Job]) -> None:
        self.scheduler, self.step_tokens, self.jobs = scheduler, step_tokens, jobs
        self.by_request: dict[Request, Job] = {}
        self.step = 0

    def run(self) -> None:
        """To the end of every job; a bounded number of steps has to do."""
        work = sum(job.prompt_len + job.max_tokens + job.paused[1] + 4 for job in self.jobs)
        bound = 100 + 2 * len(self.jobs) * work
        while any(job.request is None or not job.request.ended for job in self.jobs):
            self._before_step()
            plan = self.scheduler.plan(self._drafts_of)
            self._check_plan(plan)
            self._commit(plan)
            assert self.scheduler.check_integrity() == []
            self.step += 1
            assert self.step < bound, "somebody starves"
        assert self.scheduler.pool.num_used == 0
        assert not self.scheduler.running + self.scheduler.waiting

    def _before_step(self) -> None:
        for job in self.jobs:
            age = self.step - job.arrives
            if age == 0:
                job.request = make_request([1] * job.prompt_len, job.max_tokens)
                job.request.priority = job.priority
                self.by_request[job.request] = job
                self.scheduler.add(job.request)
            if job.request is None or job.request.ended:
                continue
            job.output.full = job.paused[0] <= age < job.paused[1]
            if age == job.cancelled_after:
                job.request.ended = True
                self.scheduler.remove(job.request)
        self.texts = [r for r in self.scheduler.running if r.sequence.num_pending == 1]
        everybody = self.scheduler.running + self.scheduler.waiting
        self.somebody_can_move = any(not request.output.full for request in everybody)
        assert self.scheduler.has_work == self.somebody_can_move

    def _drafts_of(self, request: Request) -> list[int]:
        return [2] * min(self.by_request[request].draft_len, request.room_for_drafts)

    def _check_plan(self, plan: Plan) -> None:
        assert bool(plan.shares) == self.somebody_can_move
        assert plan.batch.num_tokens <= self.step_tokens
        planned = [share.request for share in plan.shares]
        assert len(set(planned)) == len(planned)
        assert set(planned) <= set(self.scheduler.running)
        for text in self.texts:
            # A text gets its token in every step, unless it had to give its blocks away.
            if not text.output.full and text in self.scheduler.running:
                assert text in planned
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            sequence = share.request.sequence
            assert not share.request.output.full
            assert item.start == sequence.num_computed
            assert item.end <= BLOCK_SIZE * len(item.block_table)
            line = sequence.token_ids + share.drafts
            assert item.token_ids == line[item.start : item.end]
            ends_prefix = item.end == len(line)
            assert item.num_logits == (1 + len(share.drafts) if ends_prefix else 0)
            assert ends_prefix or not share.drafts

    def _commit(self, plan: Plan) -> None:
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            request, sequence = share.request, share.request.sequence
            if item.num_logits == 0:
                self.scheduler.commit(request, item.end)
                continue
            accepted = (self.step + len(sequence.token_ids)) % (len(share.drafts) + 1)
            sequence.token_ids.extend([2] * accepted + [3])
            self.scheduler.commit(request, sequence.num_tokens - 1)
            held = len(sequence.block_table)
            needed = [self.scheduler.pool.blocks_for(n) for n in (sequence.num_computed,)]
            needed.append(self.scheduler.pool.blocks_for(sequence.num_tokens))
            assert needed[0] <= held <= needed[1]
            if sequence.num_tokens >= request.max_len:
                request.ended = True
                self.scheduler.remove(request)


POOL_BLOCKS = 12
JOBS = st.lists(
    st.builds(
        Job,
        arrives=st.integers(0, 25),
        prompt_len=st.integers(1, 30),
        max_tokens=st.integers(1, 17),
        draft_len=st.integers(0, 6),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        paused=st.sampled_from([(0, 0), (0, 0), (3, 12), (0, 9), (5, 40)]),
    ),
    min_size=1,
    max_size=10,
)


@given(
    jobs=JOBS,
    num_blocks=st.integers(POOL_BLOCKS, 40),
    max_sequences=st.integers(1, 6),
    step_tokens=st.sampled_from([6, 8, 16, 64]),
)
@settings(max_examples=300, deadline=None)
def test_any_load(jobs, num_blocks, max_sequences, step_tokens):
    """Pool intact, budget kept, every text moves, nobody starves, all blocks come back."""
    scheduler = make_scheduler(num_blocks, max_sequences, step_tokens)
    Load(scheduler, step_tokens, jobs).run()


def job(prompt_len: int, max_tokens: int, arrives: int = 0, draft_len: int = 0, **more) -> Job:
    """A job with the usual values."""
    fields = {"priority": 0, "cancelled_after": None, "paused": (0, 0)} | more
    return Job(arrives, prompt_len, max_tokens, draft_len, **fields)


def commit(scheduler: Scheduler, plan: Plan) -> None:
    """A step that accepts no draft."""
    for share, item in zip(plan.shares, plan.batch.items, strict=True):
        if item.num_logits:
            share.request.sequence.token_ids.append(3)
        done = share.request.sequence.num_tokens - 1 if item.num_logits else item.end
        scheduler.commit(share.request, done)


def step(scheduler: Scheduler, num_drafts: int = 0) -> list[tuple[Request, int]]:
    """Plan and commit; who moved, by how many tokens."""
    plan = scheduler.plan(lambda request: [2] * num_drafts)
    moved = [
        (share.request, len(item.token_ids))
        for share, item in zip(plan.shares, plan.batch.items, strict=True)
    ]
    commit(scheduler, plan)
    return moved


def test_texts_go_on_while_a_long_prompt_is_read():
    """The prompt takes what the texts leave, step by step, and they never pause for it."""
    scheduler = make_scheduler(100, step_tokens=16)
    texts = [make_request([1, 1], 50) for _ in range(3)]
    for text in texts:
        scheduler.add(text)
    step(scheduler)
    prompt = make_request([1] * 100, 1)
    scheduler.add(prompt)
    for _ in range(7):
        moved = dict(step(scheduler))
        assert all(moved[text] == 1 for text in texts)
        assert moved[prompt] == 13
    assert dict(step(scheduler))[prompt] == 9


def test_drafts_leave_room_for_a_prompt():
    """However many drafts the texts have, a prompt behind them gets on at a fair pace."""
    scheduler = make_scheduler(100, step_tokens=16)
    for _ in range(4):
        scheduler.add(make_request([1, 1], 50))
    step(scheduler)
    prompt = make_request([1] * 40, 1)
    scheduler.add(prompt)
    for _ in range(5):
        moved = dict(step(scheduler, num_drafts=6))
        assert moved[prompt] >= 4
        assert sum(moved.values()) <= 16


def test_drafts_take_no_block_that_another_text_needs():
    """Drafts are optional: nobody is sent back to wait for the sake of them."""
    scheduler = make_scheduler(4, step_tokens=16)
    first, second = make_request([1] * 4, 4), make_request([1] * 4, 4)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(4):
        step(scheduler, num_drafts=5)
    assert scheduler.num_preemptions == 0
    assert first.num_generated == second.num_generated == 4


def test_the_newest_of_the_lowest_priority_gives_way():
    """Preemption takes blocks back, keeps the tokens, and the request comes again later."""
    scheduler = make_scheduler(6, step_tokens=32)
    old, important, new = (make_request([1] * 8, 20, priority=p) for p in (0, 5, 0))
    for request in (old, important, new):
        scheduler.add(request)
    for _ in range(2):
        step(scheduler)
    assert scheduler.running == [important, old]
    assert scheduler.waiting == [new]
    assert (new.sequence.block_table, new.sequence.num_computed) == ([], 0)


def test_a_reader_that_is_behind_does_not_hold_the_others_up():
    """Its blocks and its place go to those who can move; it comes again when it has caught up."""
    scheduler = make_scheduler(4, max_sequences=1)
    slow, quick = make_request([1] * 9, 4), make_request([1] * 8, 4)
    scheduler.add(slow)
    step(scheduler)
    slow.output.full = True
    scheduler.add(quick)
    for _ in range(3):
        assert [request for request, _ in step(scheduler)] == [quick]
    scheduler.remove(quick)
    assert not scheduler.has_work
    slow.output.full = False
    assert step(scheduler) == [(slow, 10)]


def test_the_waiting_line_goes_by_priority_then_arrival():
    """One at a time: the important one first, the others as they came."""
    scheduler = make_scheduler(10, max_sequences=1)
    requests = [make_request([1, 1], 1, priority=p) for p in (0, 0, 7, -3)]
    for request in requests:
        scheduler.add(request)
    order = []
    for _ in requests:
        ((moved, _),) = step(scheduler)
        order.append(requests.index(moved))
        scheduler.remove(moved)
    assert order == [2, 0, 1, 3]


def test_each_scheduler_numbers_those_that_join_it():
    """In the order in which they joined, whenever they were made and whoever else counts."""
    first, second, third = (make_request([1], 4) for _ in range(3))
    one, other = make_scheduler(10), make_scheduler(10)
    one.add(second)
    one.add(first)
    other.add(third)
    assert [each.arrival for each in (second, first, third)] == [0, 1, 0]


def test_a_step_keeps_its_own_copy_of_the_block_table():
    """A request that is cancelled while the device runs must not change what the device reads."""
    scheduler = make_scheduler(10)
    request = make_request([1] * 8, 4)
    scheduler.add(request)
    plan = scheduler.plan(lambda request: [])
    scheduler.remove(request)
    assert len(plan.batch.items[0].block_table) == 2
    assert scheduler.pool.num_used == 0


def test_sequences_must_fit_into_a_step():
    """Each running text needs a token in every step: settings that cannot keep that are refused."""
    with pytest.raises(ValueError, match="max_sequences"):
        make_scheduler(10, max_sequences=9, step_tokens=8)


def test_waiting_raises_a_priority() -> None:
    """The higher priority goes first, but not past one that has waited longer than it is worth."""
    now = 0.0
    scheduler = Scheduler(
        BlockPool(64, BLOCK_SIZE),
        max_sequences=1,
        step_tokens=32,
        max_waiting=10,
        clock=lambda: now,
    )
    running, low, high = make_request([1], 5), make_request([2], 5), make_request([3], 5)
    low.priority, high.priority = -20, 20
    scheduler.add(running)
    scheduler.plan(lambda request: [])
    scheduler.add(low)
    now = 39.0
    scheduler.add(high)
    scheduler.remove(running)
    scheduler.plan(lambda request: [])
    assert scheduler.running == [high]
    now = 80.0
    late = make_request([4], 5)
    late.priority = 20
    scheduler.add(late)
    scheduler.remove(high)
    scheduler.plan(lambda request: [])
    assert scheduler.running == [low]
