"""B46. Several choices of one request.

Symptom: the choices are equal because all have the same seed; later ones are cut when the first
ends; what a cancelled request shared is never freed.

Right: different choices, each with its index, one finish and a seed of its own that gives it again;
the prompt is computed and counted once; the same request gives the same choices, with drafts as
without; after cancels the pool is at its baseline; an impossible number is refused by name.

Fixed in vLLM by changes 11898 (one seed for all; later choices cut), 14512 and 51629 (a parent left
behind after an abort).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from outrider_kernels.noise import child_seed
from protos.outrider.v1 import inference_pb2, sampling_pb2, target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, ScriptedSequence
from tests.support.gateways import gateway_on
from tests.support.in_process import Answer, Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import assert_counts_balance, quiet_status

VOCAB_SIZE = 384
SEED = 7
(PROMPT,) = random_prompts([70], VOCAB_SIZE)


def request_for(n: int, k: int = 0, **more: object) -> target_pb2.TokenRequest:
    """Some ids end a choice, so that the choices end at different lengths."""
    request = make_request(
        PROMPT, 60, k=k, stop_token_ids=range(3, 20), temperature=1.0, seed=SEED, **more
    )
    request.n = n
    return request


async def solo_choices(target: Target, n: int) -> list[list[int]]:
    """What the choices are, asked for one by one with their own seeds."""
    found = []
    for index in range(n):
        request = request_for(1)
        request.sampling.seed = child_seed(SEED, index)
        found.append(await target.ids(request))
    return found


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["shared", "recomputed"])
async def test_choices_are_what_their_seeds_give(tiny_model: Path, prefix_cache: bool) -> None:
    """Different texts with ends of their own, the same each time and with drafts of any quality;
    the prompt counts once, and is computed once where blocks are shared."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(
            tiny_model, drafters=drafter.address, prefix_cache=prefix_cache, step_tokens=32
        ) as target,
    ):
        await wait_for_drafters(target)
        computed = (await target.status()).load.prefilled_tokens
        choices = await target.choices(request_for(3))
        computed = (await target.status()).load.prefilled_tokens - computed
        assert computed <= (len(PROMPT) + 2 * 16 if prefix_cache else 3 * len(PROMPT))
        alone = await solo_choices(target, 3)
        assert [choice.ids for choice in choices] == alone
        assert len({tuple(ids) for ids in alone}) == 3
        assert len({len(ids) for ids in alone}) > 1
        check_ends(choices)

        def known(sequence: ScriptedSequence) -> list[int]:
            seeds = [choice.seed for choice in choices]
            return alone[seeds.index(sequence.opening.sampling.seed)]

        drafter.behaviour = Drafting(Partial(known, 3, VOCAB_SIZE))
        for _ in range(2):
            again = await target.choices(request_for(3, k=4))
            assert [choice.ids for choice in again] == alone
            assert sum(choice.speculation.accepted for choice in again) > 0


def check_ends(choices: list[Answer]) -> None:
    """One finish each, with usages that add up to what was read and written."""
    assert [choice.seed for choice in choices] == [child_seed(SEED, i) for i in range(len(choices))]
    usages = [choice.finish.usage for choice in choices]
    assert [usage.prompt_tokens for usage in usages] == [len(PROMPT), 0, 0]
    assert sum(usage.completion_tokens for usage in usages) == sum(len(c.ids) for c in choices)
    for choice in choices:
        stopped = choice.finish.reason == sampling_pb2.FINISH_REASON_STOP
        assert stopped == (choice.ids[-1] in range(3, 20))


@pytest.mark.usefixtures("each_dtype")
async def test_choices_are_right_when_there_is_no_room(tiny_model: Path) -> None:
    """Two places for five choices, and a pool that preempts: the same texts."""
    async with running_target(tiny_model, max_sequences=2, kv_tokens=224, step_tokens=32) as target:
        alone = await solo_choices(target, 5)
        choices = await target.choices(request_for(5))
        assert [choice.ids for choice in choices] == alone


@pytest.mark.timeout(60)
async def test_a_cancel_ends_all_choices(tiny_model: Path) -> None:
    """Fifty requests that leave at different moments: nothing stays, and the counts balance."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address, step_tokens=32) as target,
    ):
        for turn in range(50):
            request = request_for(3, k=4 * (turn % 2))
            request.stopping.CopyFrom(sampling_pb2.StoppingParams(max_tokens=300, ignore_eos=True))
            call = target.stub.Generate(request, timeout=20)
            num_chunks = 0
            async for _ in call:
                num_chunks += 1
                if num_chunks > turn // 7:
                    break
            call.cancel()
        status = await quiet_status(target, timeout_s=10)
        assert_counts_balance(status)
        assert status.load.started == 150
        assert status.load.cancelled + status.load.finished == 150
        assert all(each.sequences == 0 for each in status.drafters)


@pytest.mark.parametrize("n", [0, 17, 10**6])
async def test_an_impossible_number_is_refused(tiny_model: Path, n: int) -> None:
    """By name, before anything starts; and resumed tokens belong to one choice only."""
    async with running_target(tiny_model) as target:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await target.choices(request_for(n))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.value.details().startswith("n:")
        request = request_for(2)
        request.resumed_token_ids.append(5)
        with pytest.raises(grpc.aio.AioRpcError, match="resumed_token_ids"):
            await target.choices(request)
        assert (await target.status()).load.started == 0


async def test_choices_count_one_by_one_in_the_waiting_line(tiny_model: Path) -> None:
    """All choices find a place, or none starts and the client is told when to come back; more than
    there are places at all is refused for good, by the field's name."""
    async with running_target(tiny_model, max_sequences=2, max_waiting=2) as target:
        with pytest.raises(grpc.aio.AioRpcError, match="n: must be .* at most 4") as refusal:
            await target.choices(request_for(5))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        batcher = target.service.batcher
        assert batcher is not None
        run_step = batcher._run_step
        batcher._run_step = lambda plan: (time.sleep(0.01), run_step(plan))[1]
        long = request_for(1)
        long.stopping.max_tokens, long.stopping.ignore_eos = 2000, True
        del long.stopping.stop_token_ids[:]
        busy = target.stub.Generate(long, timeout=30)
        await busy.read()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await target.choices(request_for(4))
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = await target.status()
        assert (status.load.started, status.load.refused) == (1, 4)
        busy.cancel()
        while (await target.status()).load.running:
            await asyncio.sleep(0.01)
        assert len(await target.choices(request_for(4))) == 4


async def test_choices_reach_the_client(tiny_model: Path) -> None:
    """Through the gateway: each choice's tokens in order, its own text, stop string and finish."""
    async with (
        running_target(tiny_model) as target,
        gateway_on(tiny_model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        direct = await target.choices(request_for(3))
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=request_for(1).sampling,
            stopping=request_for(1).stopping,
            n=3,
        )
        answers = await gateway.ask_choices(request)
        assert [answer.ids for answer in answers] == [choice.ids for choice in direct]
        assert [answer.finish.seed for answer in answers] == [choice.seed for choice in direct]
        prompts = [answer.finish.usage.prompt_tokens for answer in answers]
        assert prompts == [len(PROMPT), 0, 0]
        # A stop string that ends one choice early leaves the others alone.
        text = max((answer.text for answer in answers), key=len)
        request.stopping.stop.append(text[3:6])
        stopped = await asyncio.wait_for(gateway.ask_choices(request), 20)
        for before, after in zip(answers, stopped, strict=True):
            assert after.text == before.text.partition(text[3:6])[0]
