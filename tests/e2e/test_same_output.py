"""The promise on a real model: the same ids without drafts, with them, and when the drafter dies.

SmolLM2 in float32, in int8 and as `auto` keeps it. The short tests use six prompts of our own; the
long ones 60 of a file that is not part of this repository, evenly over its tasks: JSON lines with
"turns" and perhaps "task" or "category", as Spec-Bench has them. `make test-slow
PROMPTS=file.jsonl` names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.tokenizer import ModelTokenizer
from outrider.serving.settings import DraftSettings
from tests.support.draft_scripts import Drafting, Mute, Wrong
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import Answer, Target, running_target
from tests.support.processes import running_process
from tests.support.relay import Relay
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import READY_S, answer_all, ids_of_all, make_request

PROMPTS_VARIABLE = "TEST_PROMPTS_JSONL"
NUM_PROMPTS = 60
K = 4
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
CHAT = "Write two lines that greet a new neighbour, then write the same two lines again."
MATHS = "A baker fills 14 trays with 12 rolls each and sells 95 rolls. How many are left? Count up."
QUESTION = "Which is longer, the Nile or the Rhine?"
SUMMARY = (
    "Sum up in one sentence: The old mill stood by the river. The river rose in March, the mill "
    "lost its wheel, and the miller moved to the town, where he opened a bakery by the bridge."
)
TRANSLATION = "Translate into French: The red house on the hill has a red door and a green roof."
RETRIEVAL = (
    "Passage: The Vasa sank in Stockholm harbour in 1628, on its first voyage, and was raised in "
    "1961. Passage: The Mary Rose sank in 1545. Say word for word when and where the Vasa sank."
)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "int8", "auto"])
TEXTS = (CHAT, MATHS, QUESTION, SUMMARY, TRANSLATION, RETRIEVAL)


def encode(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each as a chat of one turn."""
    tokenizer = ModelTokenizer.load(folder)
    return [tokenizer.encode_chat([("user", text)]) for text in texts]


def prompts_of_file() -> list[str]:
    """The first prompts of each task of the named file."""
    path = os.environ.get(PROMPTS_VARIABLE)
    if not path:
        pytest.skip("no file of prompts: make test-slow PROMPTS=file.jsonl")
    by_task: dict[str, list[str]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        task = entry.get("task") or entry.get("category") or ""
        by_task.setdefault(task, []).append(entry["turns"][0])
    share = -(-NUM_PROMPTS // len(by_task))
    return [*itertools.chain(*(texts[:share] for texts in by_task.values()))][:NUM_PROMPTS]


@dataclass
class Stage:
    """A target whose drafter can be exchanged while it runs."""

    target: Target
    relay: Relay

    async def use(self, address: str) -> None:
        """Go on with the drafter at this address."""
        before = (await self.target.status()).drafters[0].connect_attempts
        self.relay.upstream = address
        self.relay.reset()
        async with asyncio.timeout(READY_S):
            while True:
                drafter = (await self.target.status()).drafters[0]
                if drafter.state == "ready" and drafter.connect_attempts > before:
                    return
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def stage_on(model: Path, first_drafter: str, **settings: object) -> AsyncIterator[Stage]:
    """The stage, with up to 16 sequences in a step."""
    async with (
        Relay(first_drafter) as relay,
        running_target(model, drafters=relay.address, max_sequences=16, **settings) as target,
    ):
        yield Stage(target, relay)


async def check_greedy(folder: Path, prompts: list[list[int]], n: int, **settings: object) -> None:
    """OFF, then lookup in the text, the target's own weights, and drafts that are always wrong."""
    dtype = str(settings.get("dtype", "float32"))
    twin_settings = DraftSettings(
        port=0, proposer="model", model=str(folder), dtype=dtype, kv_tokens=32768
    )
    async with (
        run_draft_service(DraftSettings(port=0)) as lookup,
        run_draft_service(twin_settings) as twin,
        ScriptedDrafter(Mute()) as scripted,
        stage_on(folder, lookup.address, **settings) as stage,
    ):
        target = stage.target
        off = await ids_of_all(target, [make_request(each, n) for each in prompts], 3000)
        known = {tuple(prompt): ids for prompt, ids in zip(prompts, off, strict=True)}
        scripted.behaviour = Drafting(Wrong(known, (await target.status()).vocab_size))

        async def accepted_with(drafter: str) -> tuple[int, int]:
            await stage.use(drafter)
            drafted = accepted = 0
            # A short answer may end before a model that shares busy cores has read the prompts.
            while drafted == 0:
                requests = [make_request(each, n, k=K) for each in prompts]
                on = await answer_all(target, requests, 3000)
                differing = [i for i, each in enumerate(on) if each.ids != off[i]]
                assert differing == [], f"ids of prompts {differing} differ"
                drafted, accepted = counts(on)
            return drafted, accepted

        drafted, accepted = await accepted_with(lookup.address)
        assert drafted > accepted > 0
        drafted, accepted = await accepted_with(twin.address)
        assert accepted >= 0.99 * drafted > 0
        drafted, accepted = await accepted_with(scripted.address)
        assert drafted > accepted == 0


def counts(answers: Sequence[Answer]) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    return (
        sum(answer.speculation.drafted for answer in answers),
        sum(answer.speculation.accepted for answer in answers),
    )


async def check_seeded(
    model: Path,
    prompts: list[list[int]],
    n: int,
    log_folder: Path,
    draft: dict[str, object],
    **settings: object,
) -> None:
    """OFF, ON, and ON with a drafter process that is killed when half of the tokens are there."""
    async with running_process("draft", log_folder, **draft) as drafter:
        await drafter.wait_serving()
        async with stage_on(model, drafter.address, **settings) as stage:
            target = stage.target
            await stage.use(drafter.address)

            def requests(k: int) -> list[object]:
                return [
                    make_request(prompt, n, k=k, seed=2**40 + i, **SAMPLED)
                    for i, prompt in enumerate(prompts)
                ]

            off = await ids_of_all(target, requests(0), 3000)
            on = await answer_all(target, requests(K), 3000)
            assert [answer.ids for answer in on] == off
            assert counts(on)[0] > 0
            assert target.service.batcher is not None
            totals = target.service.batcher.totals
            half = totals.generated_tokens + n * len(prompts) // 2
            running = asyncio.create_task(answer_all(target, requests(K), 3000))
            while totals.generated_tokens < half and not running.done():
                await asyncio.sleep(0.005)
            drafter.kill()
            killed = await running
            assert [answer.ids for answer in killed] == off
            assert 0 < counts(killed)[0] < counts(on)[0]
            assert (await target.status()).drafters[0].state != "ready"


@pytest.mark.timeout(300)
@each_dtype
async def test_greedy_ids_are_equal_on_a_real_model(smollm2_folder: Path, dtype: str) -> None:
    """Six prompts: a chat, a sum, a question, a summary, a translation, a retrieval."""
    await check_greedy(smollm2_folder, encode(smollm2_folder, TEXTS), 16, dtype=dtype)


@pytest.mark.timeout(300)
@each_dtype
async def test_seeded_ids_are_equal_on_a_real_model(
    smollm2_folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Sampled at temperature 0.8 and top-p 0.95, guesses by lookup, the drafter dies halfway."""
    prompts = encode(smollm2_folder, TEXTS)
    await check_seeded(smollm2_folder, prompts, 16, tmp_path, {}, dtype=dtype)


@pytest.mark.timeout(60)
async def test_seeded_ids_are_equal_with_a_model_that_dies(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The same with a draft model whose tokens nearly all stand until it dies."""
    prompts = [[5 + i, 40, 41 + i, 7] for i in range(6)]
    draft = {"proposer": "model", "model": tiny_model}
    await check_seeded(tiny_model, prompts, 200, tmp_path, draft)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_dtype
async def test_greedy_ids_are_equal_on_sixty_prompts(smollm2_folder: Path, dtype: str) -> None:
    """Sixty prompts, 96 tokens each."""
    prompts = encode(smollm2_folder, prompts_of_file())
    await check_greedy(smollm2_folder, prompts, 96, dtype=dtype, kv_tokens=32768, threads=2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_dtype
async def test_seeded_ids_are_equal_on_sixty_prompts(
    smollm2_folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Sixty prompts, 96 tokens each, sampled; the drafter dies halfway."""
    prompts = encode(smollm2_folder, prompts_of_file())
    await check_seeded(
        smollm2_folder, prompts, 96, tmp_path, {}, dtype=dtype, kv_tokens=32768, threads=2
    )
