"""Requests to a target in a line each, and short ways to send many of them at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from outrider.params import SpeculationMode, SpeculationParams
from outrider.serving.wire import speculation_to_proto
from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.in_process import Answer, Target

READY_S = 15.0


def make_request(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    k: int = 0,
    mode: SpeculationMode | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = True,
    **sampling: float,
) -> target_pb2.TokenRequest:
    """Greedy unless told otherwise. k drafts each round: 0 is OFF; `mode` AUTO makes k a cap."""
    mode = mode or (SpeculationMode.FIXED if k else SpeculationMode.OFF)
    return target_pb2.TokenRequest(
        token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(**({"temperature": 0.0} | sampling)),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        speculation=speculation_to_proto(SpeculationParams(mode, max_draft_tokens=k or None)),
    )


def random_prompts(lengths: Iterable[int], vocab_size: int = 384, seed: int = 0) -> list[list[int]]:
    """One prompt a length, without the special ids 0, 1 and 2; the same for the same arguments."""
    chance = random.Random(seed)
    return [[chance.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


async def answer_all(
    target: Target, requests: Iterable[target_pb2.TokenRequest], timeout_s: float = 300
) -> list[Answer]:
    """All at once; the answers come in the order of the requests."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(target.answer(each, timeout_s)) for each in requests]
    return [task.result() for task in tasks]


async def ids_of_all(
    target: Target, requests: Iterable[target_pb2.TokenRequest], timeout_s: float = 300
) -> list[list[int]]:
    """The same, without the ends."""
    return [answer.ids for answer in await answer_all(target, requests, timeout_s)]


async def wait_for_drafters(target: Target) -> None:
    """Return when every drafter has shaken hands."""
    async with asyncio.timeout(READY_S):
        while not all(each.state == "ready" for each in (await target.status()).drafters):
            await asyncio.sleep(0.01)


def num_steps(answer: Answer) -> int:
    """Steps that gave this answer tokens, the one that ends the prompt among them."""
    return answer.speculation.rounds + answer.speculation.plain_steps
