"""B08. A seeded request that changes with its neighbours, or with the number of drafts.

Symptom: the same seed gives another text, depending on who else was in the batch, on whether those
had seeds, or on how many steps the engine had run before.

Right: all runs of a seeded request are equal: alone, in company, after others, under any draft and
any number of drafts, also while the controller changes that number. Different seeds give different
texts. The noise is keyed by seed and position, so nothing else can matter.

Reported to vLLM: with speculation the seed of a request was ignored (6038); on a CPU a seeded
request changed when one without a seed shared its batch (51226); random draws fell to 0 and 1
(13196). TensorRT-LLM fixed the like in change 17599.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.params import SpeculationMode
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import inference_pb2, sampling_pb2, target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, Perfect, ScriptedSequence, Wrong
from tests.support.draft_stream import run_draft_service
from tests.support.gateways import Gateway, gateway_on
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
NUM_TOKENS = 48
PROMPT, *OTHERS = random_prompts([13, *range(5, 55)], VOCAB_SIZE)
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def request_a(
    seed: int = 42, k: int = 0, mode: SpeculationMode | None = None
) -> target_pb2.TokenRequest:
    """The request that must never change."""
    return make_request(PROMPT, NUM_TOKENS, k=k, mode=mode, seed=seed, **SAMPLED)


@dataclass
class Known:
    """Outputs by prompt and seed, for scripts; unknown ones are empty."""

    outputs: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def __call__(self, sequence: ScriptedSequence) -> list[int]:
        return self.outputs.get((sequence.prompt, sequence.opening.sampling.seed), [])


@dataclass
class Stage:
    """A target with a scripted drafter, and what request A says on it without drafts."""

    target: Target
    drafter: ScriptedDrafter
    known: Known
    alone: list[int]

    async def check(self, *neighbours: target_pb2.TokenRequest, k: int = 0) -> None:
        """Request A between its neighbours."""
        half = len(neighbours) // 2
        requests = [*neighbours[:half], request_a(k=k), *neighbours[half:]]
        assert (await ids_of_all(self.target, requests))[half] == self.alone


@contextlib.asynccontextmanager
async def stage_on(model: Path) -> AsyncIterator[Stage]:
    """The stage, with what A says alone."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address, kv_tokens=16384) as target,
    ):
        await wait_for_drafters(target)
        alone = await target.ids(request_a())
        known = Known({(tuple(PROMPT), 42): alone})
        yield Stage(target, drafter, known, alone)
        assert drafter.record.problems == []


async def test_a_seeded_request_alone_is_always_the_same(tiny_model: Path) -> None:
    """Three times without drafts, and with every script and number of drafts."""
    async with stage_on(tiny_model) as stage:
        await stage.check()
        await stage.check()
        for source in (
            Perfect(stage.known),
            Wrong(stage.known, VOCAB_SIZE),
            Partial(stage.known, 2, VOCAB_SIZE),
        ):
            stage.drafter.behaviour = Drafting(source)
            for k in (1, 3, 8):
                await stage.check(k=k)


@pytest.mark.usefixtures("each_dtype")
async def test_seeded_neighbours_do_not_matter(tiny_model: Path) -> None:
    """Seven neighbours with seeds of their own, some of them with drafts; three times."""
    async with stage_on(tiny_model) as stage:
        stage.drafter.behaviour = Drafting(Partial(stage.known, 3, VOCAB_SIZE))
        for turn, k in enumerate((0, 4, 8)):
            neighbours = [
                make_request(prompt, 20 + 5 * i, k=i % 3, seed=100 * turn + i, **SAMPLED)
                for i, prompt in enumerate(OTHERS[:7])
            ]
            await stage.check(*neighbours, k=k)


async def test_neighbours_without_a_seed_do_not_matter(tiny_model: Path) -> None:
    """Seven neighbours whose seeds the gateway draws, different ones each time; three times."""
    async with (
        stage_on(tiny_model) as stage,
        gateway_on(tiny_model, [stage.target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        stage.drafter.behaviour = Drafting(Partial(stage.known, 3, VOCAB_SIZE))
        drawn: set[int] = set()
        for k in (0, 4, 8):
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask_without_seed(gateway, p)) for p in OTHERS[:7]]
                group.create_task(stage.check(k=k))
            drawn |= {task.result() for task in asked}
        assert len(drawn) == 21


async def ask_without_seed(gateway: Gateway, prompt: list[int]) -> int:
    """The seed that the gateway drew for a sampled request."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(**SAMPLED),
        stopping=sampling_pb2.StoppingParams(max_tokens=30, ignore_eos=True),
    )
    answer = await gateway.ask(request)
    assert len(answer.ids) == 30
    return answer.finish.seed


@pytest.mark.usefixtures("each_dtype")
async def test_requests_before_it_do_not_matter(tiny_model: Path) -> None:
    """After fifty others the text is the same."""
    async with stage_on(tiny_model) as stage:
        stage.drafter.behaviour = Drafting(Perfect(stage.known))
        before = [make_request(p, 6, k=i % 3, seed=i, **SAMPLED) for i, p in enumerate(OTHERS)]
        await answer_all(stage.target, before)
        await stage.check(k=4)
        await stage.check()


async def test_a_controller_that_cuts_drafts_under_load_does_not_matter(tiny_model: Path) -> None:
    """Bad drafts and fifteen neighbours that come midway: the number of drafts falls, the text
    stays."""
    async with stage_on(tiny_model) as stage:
        stage.drafter.behaviour = Drafting(Partial(stage.known, 1, VOCAB_SIZE))
        requests = [
            make_request(prompt, 40, k=8, mode=SpeculationMode.AUTO, seed=i, **SAMPLED)
            for i, prompt in enumerate(OTHERS[:15])
        ]
        ids: list[int] = []
        counts: list[tuple[int, int]] = []  # rounds, drafted so far
        async with asyncio.TaskGroup() as group:
            async for chunk in stage.target.stub.Generate(
                request_a(k=8, mode=SpeculationMode.AUTO), timeout=60
            ):
                if len(ids) < 8 <= len(ids) + len(chunk.tokens):
                    group.create_task(answer_all(stage.target, requests))
                ids += [token.id for token in chunk.tokens]
                counts.append((chunk.speculation.rounds, chunk.speculation.drafted))
        assert ids == stage.alone
        sizes = {
            now[1] - before[1]
            for before, now in zip(counts, counts[1:], strict=False)
            if now[0] - before[0] <= 1
        }
        assert len(sizes) > 1, "the controller always took the same number of drafts"


@pytest.mark.usefixtures("each_dtype")
@pytest.mark.parametrize("proposer", ["ngram", "model"])
async def test_the_real_drafter_does_not_matter(tiny_model: Path, proposer: str) -> None:
    """Guesses from the text, and the target's own weights with the request's own noise; the latter
    foretell nearly everything though the text is random."""
    settings = DraftSettings(port=0, proposer=proposer, model=str(tiny_model), dtype=chosen_dtype())
    async with (
        run_draft_service(settings) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        alone = await target.ids(request_a())
        for k in (1, 4, 8):
            answer = await target.answer(request_a(k=k))
            assert answer.ids == alone
            if proposer == "model":
                assert answer.speculation.accepted >= 0.99 * answer.speculation.drafted > 0


@pytest.mark.usefixtures("each_dtype")
async def test_a_preemption_does_not_matter(tiny_model: Path) -> None:
    """Three neighbours of higher priority take its blocks midway: it comes back and goes on."""
    async with stage_on(tiny_model) as stage:
        alone = stage.alone
    async with running_target(tiny_model, kv_tokens=192, max_sequences=4) as target:
        request = request_a()
        request.priority = -1
        neighbours = [make_request(p, 60, seed=i, **SAMPLED) for i, p in enumerate(OTHERS[:3])]
        assert (await ids_of_all(target, [request, *neighbours]))[0] == alone
        assert (await target.status()).load.preemptions > 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_outside_64_bits_cannot_be_sent(seed: int) -> None:
    """The field is a uint64: the client's own library refuses them before anything is sent."""
    with pytest.raises(ValueError, match="(?i)range"):
        request_a(seed)


async def test_seeds_give_different_texts(tiny_model: Path) -> None:
    """Ten seeds give at least eight texts, with drafts the same ones as without; the smallest and
    the largest seed work."""
    seeds = [*range(43, 53), 0, 2**63 - 1, 2**64 - 1]
    async with stage_on(tiny_model) as stage:
        off = await ids_of_all(stage.target, [request_a(seed) for seed in seeds])
        assert len({tuple(ids) for ids in off[:10]}) >= 8
        for seed, ids in zip(seeds, off, strict=True):
            stage.known.outputs[tuple(PROMPT), seed] = ids
        stage.drafter.behaviour = Drafting(Partial(stage.known, 3, VOCAB_SIZE))
        assert await ids_of_all(stage.target, [request_a(seed, k=4) for seed in seeds]) == off
