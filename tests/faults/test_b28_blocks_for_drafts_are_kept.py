"""B28. Blocks that were taken for drafts and are not given back.

Symptom: each request loses a few blocks, because what was allocated for rejected drafts is not on
record; after some hours the server takes no more requests.

Right: whenever the server is idle its pool is at its baseline, however the requests ended: at the
end of their text, at a stop, at their cap, by a cancel in mid-round, or while the drafter died. No
block is owned twice or both owned and free, at any time. The same holds for the draft service's own
pool.

Reported to sglang (27789; fixed in 13826) and to sglang-jax (1147), where the allocated length was
not on record.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, Wrong
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.relay import Relay
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import assert_counts_balance, quiet_status, slow_steps

VOCAB_SIZE = 384
EOS = 2
K = 8
SMALL = {"kv_tokens": 1024, "step_tokens": 32, "max_model_len": 256}
ENDS = ("cap", "stop", "end of text", "cancel", "drafter lost")


@dataclass(frozen=True)
class Case:
    """One request, how it ends, and what it says alone."""

    prompt: list[int]
    max_tokens: int
    end: str
    cut: int
    """The index of the token at which it stops or its client leaves."""
    ids: list[int]

    def request(self) -> target_pb2.TokenRequest:
        """With drafts, waited for."""
        request = make_request(self.prompt, self.max_tokens, k=K)
        if self.end == "stop":
            request.stopping.stop_token_ids.append(self.ids[self.cut])
        if self.end == "end of text":
            # The model never says it by itself: it is made to, from this token on.
            request.stopping.ignore_eos = False
            request.stopping.min_tokens = self.cut
            request.sampling.logit_bias[EOS] = 100.0
        return request

    def expected(self) -> list[int]:
        """What has to come, unless the client leaves before."""
        if self.end == "stop":
            return self.ids[: self.ids.index(self.ids[self.cut]) + 1]
        if self.end == "end of text":
            return [*self.ids[: self.cut], EOS]
        return self.ids


async def make_cases(model: Path, count: int) -> list[Case]:
    """Prompts of 1 to 100 tokens, caps of 1 to 60, every way to end in turn."""
    chance = random.Random(28)
    prompts = random_prompts([chance.randrange(1, 101) for _ in range(count)], VOCAB_SIZE, seed=28)
    cases = []
    async with running_target(model) as plain:
        for i, prompt in enumerate(prompts):
            max_tokens = chance.randrange(1, 61)
            end = ENDS[i % len(ENDS)]
            request = make_request(prompt, max_tokens)
            cut = chance.randrange(max_tokens)
            if end == "end of text":
                request.sampling.logit_bias[EOS] = 100.0
                request.stopping.stop_token_ids.append(EOS)
                request.stopping.min_tokens = max_tokens
            cases.append(Case(prompt, max_tokens, end, cut, await plain.ids(request)))
    return cases


async def run_case(target: Target, relay: Relay, case: Case) -> None:
    """To its end, whichever that is."""
    ids: list[int] = []
    call = target.stub.Generate(case.request(), timeout=30)
    try:
        async for chunk in call:
            ids += [token.id for token in chunk.tokens]
            if case.end == "cancel" and len(ids) > case.cut:
                call.cancel()
            if case.end == "drafter lost" and len(ids) > case.cut:
                relay.reset()
    except asyncio.CancelledError:
        assert case.end == "cancel"
        assert ids == case.ids[: len(ids)]
        return
    except grpc.aio.AioRpcError as error:
        raise AssertionError(f"{case.end}: {error.details()}") from error
    assert ids == case.expected(), case.end


def watch_integrity(target: Target, counts: Counter[str]) -> None:
    """Check the pool before each step from now on, and count the steps."""
    assert target.service.batcher is not None
    scheduler = target.service.batcher.scheduler
    plan = scheduler.plan

    def checked_plan(*args: object) -> object:
        counts["steps"] += 1
        assert scheduler.check_integrity() == []
        return plan(*args)

    scheduler.plan = checked_plan


async def check_pool(target: Target, relay: Relay, cases: Sequence[Case]) -> None:
    """Ten at a time, four of them at once; the pool is read after each ten."""
    room = asyncio.Semaphore(4)

    async def run(case: Case) -> None:
        async with room:
            await run_case(target, relay, case)

    for first in range(0, len(cases), 10):
        async with asyncio.TaskGroup() as group:
            for case in cases[first : first + 10]:
                group.create_task(run(case))
        status = await quiet_status(target)
        assert status.pool.free == status.pool.total == 64
        assert_counts_balance(status)


async def check_scripted(model: Path, count: int) -> None:
    """Wrong drafts, then half right ones."""
    cases = await make_cases(model, count)
    known = {tuple(case.prompt): case.ids for case in cases}
    for source in (Wrong(known, VOCAB_SIZE), Partial(known, 3, VOCAB_SIZE)):
        async with (
            ScriptedDrafter(Mute()) as drafter,
            Relay(drafter.address) as relay,
            running_target(model, drafters=relay.address, **SMALL) as target,
        ):
            await wait_for_drafters(target)
            counts: Counter[str] = Counter()
            slow_steps(target, 0.004)  # so that drafts pay, however fast the machine
            watch_integrity(target, counts)
            drafter.behaviour = Drafting(source)
            await check_pool(target, relay, cases)
            assert counts["steps"] > count
            assert (await target.status()).speculation.drafted > count
            assert drafter.record.problems == []


async def check_real(model: Path, count: int) -> None:
    """The target's own weights as draft, with a small pool: both pools come back."""
    cases = await make_cases(model, count)
    settings = DraftSettings(
        port=0, proposer="model", model=str(model), dtype=chosen_dtype(), kv_tokens=320
    )
    async with (
        run_draft_service(settings) as drafter,
        Relay(drafter.address) as relay,
        running_target(model, drafters=relay.address, **SMALL) as target,
    ):
        await wait_for_drafters(target)
        slow_steps(target, 0.012)  # the drafter's own steps take some of them
        watch_integrity(target, Counter())
        for first in range(0, count, 10):
            await check_pool(target, relay, cases[first : first + 10])
            status = await drafter.wait_until(lambda status: status.load.sessions == 0)
            assert status.pool.free == status.pool.total == 20
            assert list(status.pool.integrity_errors) == []
        assert (await target.status()).speculation.drafted > count


@pytest.mark.timeout(60)
async def test_blocks_come_back_from_rejected_drafts(tiny_model: Path) -> None:
    """Thirty requests that end in every way."""
    await check_scripted(tiny_model, 30)


@pytest.mark.timeout(60)
async def test_blocks_come_back_at_the_draft_service(tiny_model: Path) -> None:
    """Twenty requests that end in every way."""
    await check_real(tiny_model, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [check_scripted, check_real])
async def test_blocks_come_back_after_five_hundred_requests(
    tiny_model: Path, check: object
) -> None:
    """The same with 500."""
    await check(tiny_model, 500)
