"""Any company, any order: every request says what it says alone, and the pool is whole throughout.

Requests that share beginnings come at random moments, in a pool too small for them, some with
drafts that are partly right and partly late; some clients leave. Services, wire and arithmetic are
real, the model is tiny.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.params import SpeculationMode
from protos.outrider.v1 import target_pb2
from target_service.scheduler import Scheduler
from tests.support.draft_scripts import Drafting, Late, Mute, Partial, ScriptedSequence
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import assert_counts_balance, quiet_status

VOCAB_SIZE = 384
BASES = random_prompts([70, 48, 33], VOCAB_SIZE, seed=5)
POOL_TOKENS = 208
MAX_TOKENS = 60
WAIT_S = 30


@dataclass(frozen=True)
class Case:
    """One request of a company."""

    base: int
    shared_len: int
    """Tokens of the base's beginning; the end is the request's own."""
    own: tuple[int, ...]
    max_tokens: int
    seed: int | None
    """None: greedy."""
    mode: SpeculationMode
    k: int
    after_steps: int
    """It comes that many steps after the one before it."""
    leaves_at: int | None
    """Its client leaves at this many tokens."""
    priority: int
    salt: bytes

    @property
    def prompt(self) -> list[int]:
        """A shared beginning, an end of its own."""
        return [*BASES[self.base][: self.shared_len], *self.own]

    def request(self, *, alone: bool = False) -> target_pb2.TokenRequest:
        """With drafts, or as it is asked alone."""
        sampling = {} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        mode = SpeculationMode.OFF if alone else self.mode
        k = 0 if mode is SpeculationMode.OFF else self.k
        request = make_request(self.prompt, self.max_tokens, k=k, mode=mode, **sampling)
        request.priority = self.priority
        request.cache_salt = self.salt
        return request


CASES = st.builds(
    Case,
    base=st.integers(0, len(BASES) - 1),
    shared_len=st.integers(1, 70),
    own=st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=4).map(tuple),
    max_tokens=st.integers(1, MAX_TOKENS),
    seed=st.none() | st.sampled_from([0, 7, 2**64 - 1]),
    mode=st.sampled_from(SpeculationMode),
    k=st.integers(1, 8),
    after_steps=st.integers(0, 12),
    leaves_at=st.none() | st.integers(0, MAX_TOKENS),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    salt=st.sampled_from([b"", b"", b"tenant"]),
)
COMPANIES = st.lists(CASES, min_size=2, max_size=8)


@dataclass
class World:
    """One target for all companies, and what has been seen of it."""

    target: Target
    drafter: ScriptedDrafter
    solo: dict[tuple[tuple[int, ...], int | None], list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_steps: int = 0
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def scheduler(self) -> Scheduler:
        """The target's."""
        assert self.target.service.batcher is not None
        return self.target.service.batcher.scheduler

    def watch(self) -> None:
        """Check the pool between all steps from now on."""
        plan = self.scheduler.plan

        def checked_plan(*args: object) -> object:
            self.problems += self.scheduler.check_integrity()
            made = plan(*args)
            self.problems += self.scheduler.check_integrity()
            self.num_steps += 1
            self.stepped.set()
            return made

        self.scheduler.plan = checked_plan

    def known(self, sequence: ScriptedSequence) -> list[int]:
        """What the target will say, for the drafter's script."""
        sampling = sequence.opening.sampling
        seed = sampling.seed if sampling.temperature else None
        return self.solo.get((sequence.prompt, seed), [])

    async def steps(self, count: int) -> None:
        """Let that many steps pass; without work there are none."""
        goal = self.num_steps + count
        while self.num_steps < goal and self.scheduler.running:
            self.stepped.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stepped.wait(), 0.2)

    async def solo_run(self, case: Case) -> None:
        """Find out what a request says alone, unless a longer text from the same start is known."""
        key = (tuple(case.prompt), case.seed)
        if len(self.solo.get(key, ())) < case.max_tokens:
            request = case.request(alone=True)
            request.cache_salt = b"alone"
            self.solo[key] = await self.target.ids(request)

    async def company_run(self, case: Case) -> None:
        """The request in company, as far as its client stays."""
        expected = self.solo[tuple(case.prompt), case.seed][: case.max_tokens]
        ids: list[int] = []
        call = self.target.stub.Generate(case.request(), timeout=WAIT_S)
        finished = False
        leaves_at = case.max_tokens + 1 if case.leaves_at is None else case.leaves_at
        async for chunk in call:
            assert chunk.first_index == len(ids)
            ids += [token.id for token in chunk.tokens]
            finished = chunk.HasField("finish")
            if len(ids) >= leaves_at:
                break
        call.cancel()
        assert ids == expected[: len(ids)]
        assert finished == (len(ids) == case.max_tokens)
        assert finished or len(ids) >= leaves_at

    async def check(self, company: list[Case], right: int, delay_s: float) -> None:
        """One company from its first request to its last."""
        self.drafter.behaviour = Mute()
        for case in company:
            await self.solo_run(case)
        partly_right = Drafting(Partial(self.known, right, VOCAB_SIZE))
        self.drafter.behaviour = Late(partly_right, delay_s, every=3)
        async with asyncio.TaskGroup() as group, asyncio.timeout(WAIT_S):
            for case in company:
                await self.steps(case.after_steps)
                group.create_task(self.company_run(case))
        status = await quiet_status(self.target, 5)
        assert_counts_balance(status)
        assert status.load.failed == 0
        assert self.problems == []
        assert self.drafter.record.problems == []


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory, each_dtype: str
) -> Iterator[World]:
    """A target whose pool holds about two of the requests, and a drafter."""
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    stack = contextlib.AsyncExitStack()

    async def start(model: Path) -> World:
        drafter = await stack.enter_async_context(ScriptedDrafter(Mute()))
        target = await stack.enter_async_context(
            running_target(
                model,
                drafters=drafter.address,
                kv_tokens=POOL_TOKENS,
                step_tokens=32,
                max_sequences=6,
                draft_wait_ms=5,
            )
        )
        await wait_for_drafters(target)
        world = World(target, drafter)
        world.watch()
        return world

    try:
        yield runner.run(start(model))
    finally:
        runner.run(stack.aclose())


def play(
    runner: asyncio.Runner, world: World, company: list[Case], right: int, delay_s: float
) -> None:
    """One example."""
    runner.run(world.check(company, right, delay_s))


ARGUMENTS = (COMPANIES, st.integers(0, 9), st.sampled_from([0.0, 0.003, 0.03]))
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.timeout(120)
@given(*ARGUMENTS)
@settings(max_examples=10, **UNHURRIED)
def test_every_request_says_what_it_says_alone(
    runner: asyncio.Runner, world: World, company: list[Case], right: int, delay_s: float
) -> None:
    """Greedy and seeded, with and without drafts, whoever else is there."""
    play(runner, world, company, right, delay_s)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(*ARGUMENTS)
@settings(max_examples=400, **UNHURRIED)
def test_every_request_says_what_it_says_alone_in_many_companies(
    runner: asyncio.Runner, world: World, company: list[Case], right: int, delay_s: float
) -> None:
    """The same for many more companies."""
    play(runner, world, company, right, delay_s)


@pytest.mark.timeout(60)
def test_the_pool_is_too_small_for_a_company(runner: asyncio.Runner, world: World) -> None:
    """What the companies are for: preemptions, shared beginnings and accepted drafts do happen."""
    company = [
        Case(0, 60, (9 + i,), 60, seed, SpeculationMode.FIXED, 4, 2, None, i % 2, b"")
        for i, seed in enumerate([None, 7, None, 0, 7])
    ]
    before = runner.run(world.target.status())
    world_cached = world.scheduler.num_cached_tokens
    play(runner, world, company, 3, 0.0)
    after = runner.run(world.target.status())
    assert after.load.preemptions > before.load.preemptions
    assert after.speculation.accepted > before.speculation.accepted
    assert world.scheduler.num_cached_tokens > world_cached
