"""A target whose model is a function of the tokens: everything but the arithmetic is real."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry

from outrider.engine.batch import BatchItem
from outrider.engine.block_pool import BlockPool
from outrider.engine.sampling import BadLogits
from outrider.serving.device import DeviceThread
from target_service.batcher import Batcher
from target_service.draft_client import DraftClient
from target_service.draft_hub import DraftHub
from target_service.draft_link import DraftedSequence
from target_service.draft_tail import DraftTotals, ProposedTokens
from target_service.metrics import TargetMetrics
from target_service.observer import Observer
from target_service.request import Request
from target_service.scheduler import Plan, Planned, Scheduler
from target_service.verifier import Failure, Outcome, Verdict
from target_service.window import StepCost
from tests.support.draft_stream import make_hello
from tests.support.target_parts import MAX_DRAFT_TOKENS, VOCAB_SIZE, CollectedOutput, make_request

STOP_ID = 0
WAIT_S = 5.0


def next_token(prefix: Sequence[int]) -> int:
    """What this model says behind a prefix: a repeatable mess with a stop now and then."""
    mixed = len(prefix)
    for token in prefix[-8:]:
        mixed = (mixed * 31 + token) % 1_000_003
    return mixed % 97


def solo(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The text that a request has to give, alone or in company."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids))
        if ids[-1] == STOP_ID:
            break
    return ids[len(prompt) :]


class FunctionModel:
    """Stands for the device: a step is `next_token` applied to what the plan forwards.

    `fails(request)` poisons steps; after `hold` a step waits until `release` is called.
    """

    def __init__(self) -> None:
        self.fails: Callable[[Request], bool] = lambda request: False
        self.cannot_judge: Callable[[Request], bool] = lambda request: False
        self.step_s = 0.0
        self.num_steps = 0
        self.running = threading.Event()
        self._gate = threading.Event()
        self._gate.set()

    def hold(self) -> None:
        """Let the next step wait."""
        self.running.clear()
        self._gate.clear()

    def release(self) -> None:
        """Let it go on."""
        self._gate.set()

    async def wait_running(self) -> None:
        """Until a step is on the device."""
        assert await asyncio.to_thread(self.running.wait, WAIT_S)

    def run(self, plan: Plan) -> list[Outcome]:
        """One step."""
        self.num_steps += 1
        self.running.set()
        assert self._gate.wait(WAIT_S)
        time.sleep(self.step_s)
        verdicts: list[Outcome] = []
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            if self.fails(share.request):
                raise ArithmeticError("poisoned")
            if item.num_logits == 0:
                verdicts.append(None)
            elif self.cannot_judge(share.request):
                verdicts.append(Failure(BadLogits("the best logit is nan")))
            else:
                verdicts.append(self._verify(share, item))
        return verdicts

    def _verify(self, share: Planned, item: BatchItem) -> Verdict:
        line = [*share.request.sequence.token_ids, *share.drafts]
        assert item.token_ids == line[item.start :]
        prefix = line[: len(line) - len(share.drafts)]
        tokens: list[int] = []
        for draft in [*share.drafts, None]:
            tokens.append(next_token([*prefix, *tokens]))
            if tokens[-1] != draft:
                break
        return Verdict(tokens, len(tokens) - 1)


class FakeHub:
    """Drafters without a wire: `guess(prefix)` at once, or never when `late`."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self.guess: Callable[[Sequence[int]], int] = next_token
        self.late = False
        self.clients: list[DraftClient] = []
        self.frames: Counter[str] = Counter()
        self.connect_attempts = 0
        self.open_sequences: dict[DraftedSequence, int] = {}
        self._arrived = arrived

    def start(self) -> None:
        """Nothing to connect to."""

    async def stop(self) -> None:
        """Nothing to hang up."""

    def open(self, sequence: DraftedSequence) -> None:
        """A sequence that wants drafts."""
        self.open_sequences[sequence] = 0

    def update(self, sequence: DraftedSequence, window: int) -> None:
        """Fill the window."""
        self.open_sequences[sequence] = window
        ids = list(sequence.confirmed)
        while not self.late and len(ids) < len(sequence.confirmed) + window:
            ids.append(self.guess(ids))
        seen = len(sequence.confirmed)
        if len(ids) > seen:
            tail = sequence.tail
            tail.add(ProposedTokens(tail.epoch, seen, seen, ids[seen:]))
            self._arrived.set()

    def close(self, sequence: DraftedSequence) -> None:
        """The sequence has ended."""
        self.open_sequences.pop(sequence)

    def granted(self, sequence: DraftedSequence) -> int:
        """Drafts to hope for."""
        return self.open_sequences[sequence]

    def note_vain_wait(self, sequence: DraftedSequence) -> None:
        """It is late on purpose."""


class Target:
    """A batcher with everything around it."""

    def __init__(
        self, addresses: Sequence[str], *, num_blocks: int, max_sequences: int, max_waiting: int
    ) -> None:
        self.model = FunctionModel()
        self.cost, self.drafts = StepCost(), DraftTotals()
        self.wake, arrived = asyncio.Event(), asyncio.Event()
        self.registry = CollectorRegistry()
        observer = Observer(self.registry)
        self.metrics = TargetMetrics(self.registry, observer, MAX_DRAFT_TOKENS)
        self.hub = (
            FakeHub(arrived)
            if not addresses
            else DraftHub(
                addresses,
                make_hello(vocab_size=VOCAB_SIZE),
                arrived.set,
                totals=self.drafts,
                observer=observer,
            )
        )
        self.num_deaths = 0
        self.pool = BlockPool(num_blocks, 4)
        self.scheduler = Scheduler(
            self.pool, max_sequences=max_sequences, step_tokens=16, max_waiting=max_waiting
        )
        self.device = DeviceThread("test-device")
        self.batcher = Batcher(
            self.scheduler,
            self.hub,
            self.model.run,
            device=self.device,
            cost=self.cost,
            wake=self.wake,
            arrived=arrived,
            on_dead=self._note_death,
            observer=observer,
        )
        self.metrics.attach(self.batcher, self.hub, self.drafts)
        self.requests: list[Request] = []

    def _note_death(self) -> None:
        self.num_deaths += 1

    def submit(self, prompt: list[int], max_tokens: int, **more) -> Request:
        """A request that is under way."""
        request = make_request(
            prompt,
            max_tokens,
            stop_ids=[STOP_ID],
            cost=self.cost,
            totals=self.drafts,
            **more,
        )
        self.batcher.submit(request)
        self.requests.append(request)
        return request

    async def settle(self) -> None:
        """Until every request has ended."""
        async with asyncio.timeout(WAIT_S):
            while not all(request.ended for request in self.requests):
                await asyncio.sleep(0.001)

    @property
    def num_drafted_sequences(self) -> int:
        """Sequences that a drafter works for, or that wait for one."""
        if isinstance(self.hub, FakeHub):
            return len(self.hub.open_sequences)
        return sum(client.num_sequences for client in self.hub.clients) + len(self.hub._homeless)

    def check_clean(self) -> None:
        """Nothing is held for requests that are over, and the books balance."""
        assert self.scheduler.check_integrity() == []
        totals = self.batcher.totals
        ended = totals.finished + totals.failed + totals.cancelled
        present = len(self.scheduler.running) + len(self.scheduler.waiting)
        assert totals.started == ended + present
        drafted = self.batcher.speculation.drafted
        tails = [request.drafts.tail for request in self.requests if request.drafts]
        unused = sum(self.drafts.unused.values())
        open_tokens = sum(tail.num_open for tail in tails)
        assert self.drafts.num_proposed == drafted + unused + open_tokens
        if not present:
            assert self.pool.num_used == 0
            assert open_tokens == 0
            assert self.num_drafted_sequences == 0
            assert not self.batcher._gate._since
            assert not self.batcher._gate._open


@contextlib.asynccontextmanager
async def running_target(
    *addresses: str, num_blocks: int = 64, max_sequences: int = 8, max_waiting: int = 100
) -> AsyncIterator[Target]:
    """A target that runs steps, checked at the end; without addresses its drafters are fake."""
    target = Target(
        addresses, num_blocks=num_blocks, max_sequences=max_sequences, max_waiting=max_waiting
    )
    target.batcher.start()
    target.hub.start()
    try:
        yield target
        await target.settle()
        target.check_clean()
    finally:
        target.model.release()
        await target.batcher.stop()
        await target.hub.stop()
        target.device.close()


def output_of(request: Request) -> CollectedOutput:
    """Where its tokens went."""
    assert isinstance(request.output, CollectedOutput)
    return request.output
