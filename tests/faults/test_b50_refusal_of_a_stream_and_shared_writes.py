"""B50: an early refusal of a stream is taken for something else; writes to one stream overlap.

Symptom: a server ends a bidirectional call at once, its client is just writing, and what it sees is
an internal error half of the time, so that it tries again where it should not; two coroutines that
write to one stream break it. Right: the target knows the true status and does not knock at a closed
door in a tight loop; fifty requests share one stream, come and go in the same moment, and every
update arrives whole, once and in order. Reported in public of gRPC itself: the hidden status of a
call that ends early, and a failed batch on a write.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from tests.support.draft_scripts import Drafting, Empty, Perfect
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import Record, ScriptedDrafter
from tests.support.token_requests import wait_for_drafters
from tests.support.token_streams import (
    AUTO,
    OFF,
    assert_counts_balance,
    greedy,
    quiet_status,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)

PERMANENT = [
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
]
NUM_SHARING = 50


async def check_refusals(model: Path, code: grpc.StatusCode, tries: int) -> None:
    """As many drafters as tries, each of which refuses every stream while the target writes."""
    async with contextlib.AsyncExitStack() as stack:
        drafters = [
            await stack.enter_async_context(ScriptedDrafter(Empty(), refuse=(code, "go away")))
            for _ in range(tries)
        ]
        addresses = ",".join(drafter.address for drafter in drafters)
        target = await stack.enter_async_context(running_target(model, addresses))

        async def all_refused() -> bool:
            states = {each.state for each in (await target.status()).drafters}
            return states == {"refused"}

        await wait_until(all_refused, 20)
        right = f"{code.name}: go away"
        reasons = [each.reason for each in (await target.status()).drafters]
        assert sum(reason == right for reason in reasons) >= 0.99 * tries, reasons
        opened = [drafter.record.streams_opened for drafter in drafters]
        assert sum(opened) <= 1.5 * tries  # a second look where the first status was hidden
        await asyncio.sleep(1.0)
        assert [drafter.record.streams_opened for drafter in drafters] == opened
        assert len(await target.ids(greedy([5, 6], 20))) == 20


@pytest.mark.parametrize("code", PERMANENT)
async def test_the_true_status_of_a_refusal_is_known(
    code: grpc.StatusCode, tiny_model: Path
) -> None:
    """20 tries: the target names the code, leaves such a drafter alone and goes on without it."""
    await check_refusals(tiny_model, code, 20)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("code", PERMANENT)
async def test_the_true_status_of_a_hundred_refusals_is_known(
    code: grpc.StatusCode, tiny_model: Path
) -> None:
    """The same with 100."""
    await check_refusals(tiny_model, code, 100)


async def cancel_after(target: Target, prompt: list[int], num_chunks: int) -> None:
    """Read some of a long answer, then leave."""
    call = target.stub.Generate(greedy(prompt, 400, AUTO), timeout=30)
    for _ in range(num_chunks):
        await call.read()
    call.cancel()


def assert_in_order(record: Record, num_sequences: int) -> None:
    """One stream, and every sequence's updates are whole, once and in order."""
    assert record.problems == []  # a wrong base_len, an update behind the last one, and so on
    assert record.streams_opened == 1
    ids = record.sequence_ids()
    assert len(ids) == num_sequences
    for sequence_id in ids:
        updates = record.of(sequence_id)
        assert [update.update_seq for update in updates] == list(range(1, len(updates) + 1))
        assert [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]


async def test_fifty_requests_share_a_stream(tiny_model: Path) -> None:
    """All of them start in one moment, every third leaves soon after, twice: no update is lost,
    doubled or mixed with another, the others' ids are those of a run without drafts, and these were
    used."""
    prompts = [[5 + i, 6, 7 + i % 3] for i in range(NUM_SHARING)]
    leaving, staying = prompts[::3], [p for i, p in enumerate(prompts) if i % 3]
    settings = {"max_sequences": NUM_SHARING, "kv_tokens": 32768}
    async with running_target(tiny_model, **settings) as alone:
        outputs = await asyncio.gather(*(alone.ids(greedy(p, 60, OFF)) for p in staying))
    known = {tuple(p): ids for p, ids in zip(staying, outputs, strict=True)}
    async with (
        ScriptedDrafter(Drafting(Perfect(known))) as drafter,
        running_target(tiny_model, drafter.address, **settings) as target,
    ):
        await wait_for_drafters(target)
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                left = [
                    group.create_task(cancel_after(target, prompt, 1 + i % 4))
                    for i, prompt in enumerate(leaving)
                ]
                kept = [group.create_task(target.ids(greedy(p, 60, AUTO))) for p in staying]
            assert [task.result() for task in kept] == outputs
            assert len(left) == len(leaving)
        status = await quiet_status(target)
        assert_counts_balance(status)
        assert status.speculation.accepted > 0
        assert status.load.failed == 0

        async def everything_finished() -> bool:
            return len(drafter.record.finished) == len(drafter.record.sequence_ids())

        await wait_until(everything_finished, 5)
        assert_in_order(drafter.record, 2 * NUM_SHARING)
