"""B21. Drafting pauses, and when it goes on the drafter has lost the thread.

Symptom: after a spell without drafts, acceptance stays near zero for requests that were already
running, because the drafter was not told what was said meanwhile; or the drafter goes on working
though nobody asks it; or it does not heed how much it may draft.

Right: while k is 0 the drafter is told of every confirmed token and computes nothing. Once k is
above 0 again, its drafts are as good as before from the first rounds on, and no other request has
to come for that to happen. The ids are those of OFF.

Fixed in TensorRT-LLM (16888), vllm-metal (716) and vLLM (51575: k was not heeded; 49548: k jumped
whenever a prompt joined).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import target_pb2
from target_service.window import NO_DRAFTS, SequenceWindow, Wish
from tests.support.draft_scripts import Drafting, Mute, Perfect, Wrong
from tests.support.draft_stream import RunningDraft, run_draft_service
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import TimedStream, slow_steps

VOCAB_SIZE = 384
K = 4
NUM_TOKENS = 300
(PROMPT,) = random_prompts([23], VOCAB_SIZE, seed=21)
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 21}}


class Closable:
    """A request's window controller that a test may hold at k = 0."""

    def __init__(self, window: SequenceWindow) -> None:
        self._window = window
        self.closed = False

    def wish(self, now_s: float, lag: float) -> Wish:
        """What the controller says, or nothing."""
        return NO_DRAFTS if self.closed else self._window.wish(now_s, lag)

    def __getattr__(self, name: str) -> object:
        return getattr(self._window, name)


@dataclass
class Reader:
    """A request that is being read, and what its rounds did."""

    target: Target
    ids: list[int]
    counts: list[tuple[int, int, int]]
    """After each chunk: rounds, drafted, accepted so far."""
    _chunks: AsyncIterator[target_pb2.TokenChunk]

    async def read(self, num_tokens: int) -> None:
        """At least that many more tokens, or to the end."""
        goal = len(self.ids) + num_tokens
        while len(self.ids) < goal:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return
            self.ids += [token.id for token in chunk.tokens]
            stats = chunk.speculation
            self.counts.append((stats.rounds, stats.drafted, stats.accepted))

    def close_window(self) -> Closable:
        """From now on its k can be held at 0."""
        assert self.target.service.batcher is not None
        (request,) = self.target.service.batcher.scheduler.running
        request.window = window = Closable(request.window)
        return window


@contextlib.asynccontextmanager
async def reading(target: Target, request: target_pb2.TokenRequest) -> AsyncIterator[Reader]:
    """One request, read as the test says; with a small stream the target does not run ahead."""
    call = target.stub.Generate(request, timeout=60)
    yield Reader(target, [], [], aiter(call))
    call.cancel()


async def proposed(drafter: RunningDraft) -> int:
    """Tokens that the drafter has computed."""
    return (await drafter.status()).proposed_tokens


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_a_twin_is_right_at_once_after_a_pause(
    tiny_model: Path, sampling: dict[str, float]
) -> None:
    """The target's own weights as draft: after 100 tokens at k = 0 at least 99 of 100 drafts stand,
    from the third round on; in between the drafter computed nothing."""
    settings = DraftSettings(port=0, proposer="model", model=str(tiny_model), dtype=chosen_dtype())
    async with (
        run_draft_service(settings) as drafter,
        running_target(tiny_model, drafters=drafter.address, stream_tokens=16) as target,
    ):
        await wait_for_drafters(target)
        off = await target.ids(make_request(PROMPT, NUM_TOKENS, **sampling))
        async with reading(target, make_request(PROMPT, NUM_TOKENS, k=K, **sampling)) as reader:
            await reader.read(60)
            window = reader.close_window()
            for _ in range(2):
                window.closed = True
                await reader.read(30)  # what was under way is over
                before, rounds = await proposed(drafter), reader.counts[-1][0]
                await reader.read(50)
                assert await proposed(drafter) == before
                assert reader.counts[-1][0] == rounds, "drafts were verified at k = 0"
                window.closed = False
                await reader.read(30)
            await reader.read(NUM_TOKENS)
            assert reader.ids == off
            since = next(each for each in reader.counts if each[0] >= rounds + 3)
            last = reader.counts[-1]
            drafted, accepted = last[1] - since[1], last[2] - since[2]
            assert accepted >= 0.99 * drafted > 0
            assert (await target.status()).speculation.frames["resync"] == 0


@pytest.mark.timeout(60)
async def test_the_controller_comes_back_by_itself(tiny_model: Path) -> None:
    """Drafts that are never right bring k to 0. Nobody else comes, the drafter is told of every
    token, and when its drafts become right they are used within two seconds."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await target.ids(make_request(PROMPT, 480))
        known = {tuple(PROMPT): off}
        drafter.behaviour = Drafting(Wrong(known, VOCAB_SIZE))
        slow_steps(target, 0.01)
        stream = TimedStream()
        request = make_request(PROMPT, 480, k=K, mode=SpeculationMode.AUTO)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.run(target.stub, request, 50))
            await drafter.record.wait_for(lambda record: len(record.updates) > 60)
            windows = drafter.record.windows(1)
            assert windows[-40:].count(0) > 30, "k did not fall to 0"
            drafter.behaviour = Drafting(Perfect(known))
            mended_s = asyncio.get_running_loop().time()
            while not stream.num_drafted_after(mended_s) and stream.finish is None:
                await asyncio.sleep(0.02)
            assert asyncio.get_running_loop().time() - mended_s < 2
            assert stream.finish is None
            tokens = len(stream.ids)
            await stream.wait_tokens(tokens + 60)
            assert stream.num_drafted_after(mended_s) > 40
        assert stream.ids == off
        assert drafter.record.problems == []
        told = [token for update in drafter.record.of(1) for token in update.tokens]
        assert told == (PROMPT + off)[: len(told)]
        assert len(told) > len(PROMPT + off) - 3 * K
