"""B34: a slow drafter, and replies that arrive a round late.

Symptom: the target runs at the drafter's pace, or a late proposal lands at the wrong position.
Right: the ids are those of a run without drafts; after a moment the target is nearly as fast as
without; it stops asking but for a probe now and then; a reply for a position that is not the
current one is dropped and counted; requests whose replies are quick are held back by a slow one for
no more than the deadline. Reported in public: waiting on both legs of the round trip
(sgl-project/sglang pull requests 29017 and 29482), and output of an old state that is applied to a
new one (vllm-project/vllm pull request 49620).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from protos.outrider.v1 import draft_pb2, sampling_pb2
from tests.support.draft_scripts import (
    Behaviour,
    Crossing,
    Drafting,
    Going,
    Known,
    Late,
    Partial,
    Perfect,
    Reply,
    ScriptedSequence,
)
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_streams import (
    AUTO,
    OFF,
    TimedStream,
    assert_counts_balance,
    fixed,
    greedy,
    quiet_status,
    slow_steps,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)

NUM_TOKENS = 200
DEADLINE_S = 0.05
PROMPTS = [[5 + (i * 41 + j * 13) % 370 for j in range(4 + i)] for i in range(8)]


class Echoing:
    """Honest, and says everything a second time, `updates` rounds later, as it was said then."""

    def __init__(self, behaviour: Behaviour, updates: int) -> None:
        self._behaviour = behaviour
        self._updates = updates

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        replies = self._behaviour.answer(sequence)
        echoes = [Reply(reply.frame, hold_updates=self._updates) for reply in replies]
        return replies + echoes


class Bench:
    """A target with one scripted drafter, and what the prompts give without drafts."""

    def __init__(self, target: Target, drafter: ScriptedDrafter, known: Known) -> None:
        self.target = target
        self.drafter = drafter
        self.known = known

    async def run(
        self, count: int, speculation: sampling_pb2.SpeculationParams = AUTO
    ) -> list[TimedStream]:
        """The first `count` prompts at once; their ids must be those without drafts."""
        streams = [TimedStream() for _ in range(count)]
        async with asyncio.TaskGroup() as group:
            for stream, prompt in zip(streams, PROMPTS, strict=False):
                request = greedy(prompt, NUM_TOKENS, speculation)
                group.create_task(stream.run(self.target.stub, request, 50))
        for stream, prompt in zip(streams, PROMPTS, strict=False):
            assert stream.ids == self.known[tuple(prompt)]
        return streams

    async def check_counts(self) -> dict[str, int]:
        """Every proposed token has one fate; the numbers of unused ones by reason."""
        await self.drafter.record.wait_for(
            lambda record: len(record.finished) == len(record.sequence_ids())
        )
        status = await quiet_status(self.target)
        assert_counts_balance(status)
        assert self.drafter.record.problems == []
        return dict(status.speculation.unused)


@contextlib.asynccontextmanager
async def bench(
    model: Path, make: Callable[[Known], Behaviour], step_s: float, **settings: object
) -> AsyncIterator[Bench]:
    """Steps take `step_s` once the expected ids are known. settings: the target's."""
    async with running_target(model) as alone:
        outputs = await asyncio.gather(
            *(alone.ids(greedy(prompt, NUM_TOKENS, OFF)) for prompt in PROMPTS)
        )
    known = {tuple(p): ids for p, ids in zip(PROMPTS, outputs, strict=True)}
    async with (
        ScriptedDrafter(make(known)) as drafter,
        running_target(
            model, drafter.address, draft_wait_ms=DEADLINE_S * 1000, **settings
        ) as target,
    ):

        async def ready() -> bool:
            return (await target.status()).drafters[0].state == "ready"

        await wait_until(ready, 5)
        slow_steps(target, step_s)
        yield Bench(target, drafter, known)


def random_delay(high_s: float) -> Callable[[ScriptedSequence], float]:
    """Another delay each time, the same ones in every run."""
    source = random.Random(34)
    return lambda _: source.uniform(0, high_s)


def slow_first(delay_s: float) -> Callable[[ScriptedSequence], float]:
    """Only the first prompt's replies are late."""
    return lambda sequence: delay_s if sequence.prompt == tuple(PROMPTS[0]) else 0.0


def asked(bench: Bench) -> list[int]:
    """The windows that the only sequence granted, in order."""
    (sequence_id,) = bench.drafter.record.sequence_ids()
    return bench.drafter.record.windows(sequence_id)


LATENESS: dict[str, Callable[[Known], Behaviour]] = {
    "always_ten_steps": lambda known: Late(Drafting(Perfect(known)), 0.2),
    "up_to_four_steps": lambda known: Late(Drafting(Perfect(known)), random_delay(0.08)),
    "one_in_ten": lambda known: Late(Drafting(Perfect(known)), 0.2, every=10),
    "wrong_and_late": lambda known: Late(Drafting(Partial(known, 2, 384)), random_delay(0.08)),
}


@pytest.mark.parametrize("lateness", LATENESS)
async def test_late_replies_change_no_token(lateness: str, tiny_model: Path) -> None:
    """However late the replies are, every stream gives the ids of a run without drafts, each
    proposed token is accounted for once, and replies that keep their order never leave a gap."""
    async with bench(tiny_model, LATENESS[lateness], step_s=0.02) as at:
        await at.run(len(PROMPTS))
        assert "gap" not in await at.check_counts()


OLD_REPLIES: dict[str, tuple[Callable[[Known], Behaviour], set[str]]] = {
    "right_for_a_confirmed_position": (
        lambda known: Late(Drafting(Perfect(known)), 0.06),
        {"late"},
    ),
    "said_again_two_rounds_later": (
        lambda known: Echoing(Drafting(Perfect(known)), 2),
        {"late", "duplicate"},
    ),
    "behind_a_token_that_was_refused": (
        lambda known: Crossing(Drafting(Partial(known, 2, 384)), 2),
        {"stale", "mismatch"},
    ),
    "of_an_epoch_that_is_over": (
        lambda known: Echoing(
            Going(
                Drafting(Perfect(known)),
                4,
                draft_pb2.SequenceGone.REASON_EVICTED,
            ),
            2,
        ),
        {"stale"},
    ),
}


@pytest.mark.parametrize("kind", OLD_REPLIES)
@pytest.mark.parametrize("k", [1, 4, 8])
async def test_a_reply_for_an_old_position_is_dropped_and_counted(
    kind: str, k: int, tiny_model: Path
) -> None:
    """Tokens that were right for an older position never land at the current one; the numbers say
    why they were not used."""
    make, reasons = OLD_REPLIES[kind]
    # A round that waits for crossing frames would wait for its own next update.
    speculation = fixed(k) if kind == "said_again_two_rounds_later" else AUTO
    if speculation is AUTO:
        speculation = sampling_pb2.SpeculationParams(mode=AUTO.mode, max_draft_tokens=k)
    async with bench(tiny_model, make, step_s=0.01) as at:
        await at.run(3, speculation)
        unused = await at.check_counts()
        assert any(unused.get(reason) for reason in reasons), unused


async def test_a_target_stops_asking_a_slow_drafter_and_probes(tiny_model: Path) -> None:
    """With replies ten steps late, k reaches 0 for most of the time, and a probe comes now and
    then; nearly every step is a plain one."""

    def make(known: Known) -> Behaviour:
        # Counted in steps: in a time, a busy machine makes fewer of them.
        return Crossing(Drafting(Perfect(known)), 10)

    async with bench(tiny_model, make, step_s=0.02) as at:
        (stream,) = await at.run(1)
        windows = asked(at)
        first_zero = windows.index(0, 1)
        assert any(windows[first_zero:]), "no probe"
        assert windows.count(0) > len(windows) / 2
        assert stream.finish.speculation.plain_steps > 0.8 * NUM_TOKENS


async def test_quick_sequences_keep_their_drafts_beside_a_slow_one(tiny_model: Path) -> None:
    """Seven sequences with good and quick replies live from drafts although the eighth's replies
    come 25 steps late."""
    async with bench(
        tiny_model, lambda known: Late(Drafting(Perfect(known)), slow_first(0.5)), step_s=0.02
    ) as at:
        slow, *quick = await at.run(len(PROMPTS))
        for stream in quick:
            assert stream.finish.speculation.accepted > 0.6 * NUM_TOKENS
        assert max(each.arrivals[-1][0] for each in quick) < slow.arrivals[-1][0]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("max_window", [8, 16])
@pytest.mark.parametrize("count", [1, 4])
async def test_a_slow_drafter_costs_little_speed(
    count: int, max_window: int, tiny_model: Path
) -> None:
    """Replies 500 ms late, steps of 50 ms: after 3 s the speed is at least 80 % of that without
    drafts. Where a drafter may not run ahead as far as it is late, ten steps, the window is 0 but
    for a probe now and then; where it may, its drafts are of use although nobody waits for them."""
    async with bench(
        tiny_model,
        lambda known: Late(Drafting(Perfect(known)), 0.5),
        0.05,
        max_window=max_window,
    ) as at:
        started = time.monotonic()
        plain = await at.run(count, OFF)
        plain_speeds = [stream.tokens_per_s(started + 3) for stream in plain]
        started = time.monotonic()
        drafted = await at.run(count)
        speeds = [stream.tokens_per_s(started + 3) for stream in drafted]
        for speed, plain_speed in zip(speeds, plain_speeds, strict=True):
            assert speed >= 0.8 * plain_speed
        if count == 1 and max_window == 8:
            windows = asked(at)
            assert windows.count(0) > len(windows) / 2
            assert any(windows[windows.index(0, 1) :]), "no probe"
        if max_window == 16:
            assert all(stream.finish.speculation.accepted > 0 for stream in drafted)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lateness", ["up_to_four_steps", "one_in_ten"])
async def test_now_and_then_late_replies_cost_little_speed(lateness: str, tiny_model: Path) -> None:
    """Replies 0 to 200 ms late, or one in ten by 500 ms, with steps of 50 ms: never slower than 80
    % of the speed without drafts."""
    makes: dict[str, Callable[[Known], Behaviour]] = {
        "up_to_four_steps": lambda known: Late(Drafting(Perfect(known)), random_delay(0.2)),
        "one_in_ten": lambda known: Late(Drafting(Perfect(known)), 0.5, every=10),
    }
    async with bench(tiny_model, makes[lateness], 0.05) as at:
        started = time.monotonic()
        plain = await at.run(4, OFF)
        plain_speeds = [stream.tokens_per_s(started) for stream in plain]
        started = time.monotonic()
        drafted = await at.run(4)
        speeds = [stream.tokens_per_s(started) for stream in drafted]
        for speed, plain_speed in zip(speeds, plain_speeds, strict=True):
            assert speed >= 0.8 * plain_speed


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_slow_sequence_holds_nobody_back_for_longer_than_the_deadline(
    tiny_model: Path,
) -> None:
    """One sequence's replies are 500 ms late, seven are quick, steps take 50 ms: no gap of a quick
    stream is longer than a step and the deadline, but for the machine's own noise."""
    step_s, noise_s = 0.05, 0.03
    async with bench(
        tiny_model, lambda known: Late(Drafting(Perfect(known)), slow_first(0.5)), step_s
    ) as at:
        _, *quick = await at.run(len(PROMPTS))
        for stream in quick:
            assert max(stream.gaps_after(0)) <= step_s + DEADLINE_S + noise_s
