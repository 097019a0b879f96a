"""B25. Usage and ids that disagree with what was delivered.

Symptom: more completion tokens are charged than were sent, because a whole block of accepted drafts
is counted though the text ended inside it; the last tokens are lost when the reason for the end
comes with them; ids and scores go on behind the stop.

Right: usage is that of OFF and the number of ids and of scores that came. So is the rise of the
service's own counter of tokens, but for what the target had begun when the gateway found a stop
string. There is one end, and nothing behind it.

Fixed in ik_llama.cpp (2358: the whole block charged), vLLM (47616: ids and scores behind a stop
string) and dynamo (3531: the last tokens lost); reported to sglang (39826: one counter runs past
the stop), vLLM (5708: chunks counted as tokens) and mlx-dspark (37: the shape of the last chunk).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.draft_scripts import Drafting, Mute, Perfect
from tests.support.gateways import Answer, Gateway, gateway_on
from tests.support.in_process import Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters

K = 6
NUM_TOKENS = 20
(PROMPT,) = random_prompts([17], 300, seed=25)
Speculation = sampling_pb2.SpeculationParams


@dataclass(frozen=True)
class Stage:
    """A gateway in front of a target whose drafter is always right."""

    gateway: Gateway
    target: Target
    off: Answer
    """Without drafts, to the cap."""

    async def ask(self, k: int, *, n: int = 1, **stopping: object) -> Answer:
        """Greedy, with scores: one answer that agrees with its own usage."""
        counter = await self.counter()
        mode = Speculation.MODE_FIXED if k else Speculation.MODE_OFF
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StoppingParams(
                **{"max_tokens": NUM_TOKENS, "ignore_eos": True} | stopping
            ),
            speculation=Speculation(mode=mode, max_draft_tokens=k or None),
            logprobs=1,
            n=n,
        )
        answers = await self.gateway.ask_choices(request)
        for answer in answers:
            assert answer.finish.usage.completion_tokens == len(answer.ids)
            assert all(each.HasField("logprob") and each.top for each in answer.tokens)
        assert answers[0].finish.usage.prompt_tokens == len(PROMPT)
        assert all(each.finish.usage.prompt_tokens == 0 for each in answers[1:])
        counted = await self.counter() - counter
        delivered = sum(len(answer.ids) for answer in answers)
        if stopping.get("stop"):
            assert delivered <= counted
        else:
            assert counted == delivered
        return answers[0]

    async def counter(self) -> int:
        """Tokens that the target has made."""
        return (await self.target.status()).load.generated_tokens


@contextlib.asynccontextmanager
async def stage_on(model: Path) -> AsyncIterator[Stage]:
    """The stage."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address) as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        await wait_for_drafters(target)
        longer = await target.ids(make_request(PROMPT, NUM_TOKENS + K))
        drafter.behaviour = Drafting(Perfect({tuple(PROMPT): longer}))
        stage = Stage(gateway, target, Answer())
        stage = Stage(gateway, target, await stage.ask(0))
        assert stage.off.ids == longer[:NUM_TOKENS]
        yield stage
        assert drafter.record.problems == []


def values(answer: Answer) -> list[tuple[int, float]]:
    """Ids and scores."""
    return [(token.id, token.logprob) for token in answer.tokens]


async def test_every_cap(tiny_model: Path) -> None:
    """From 1 token to 20: as many ids, scores and charged tokens as OFF, and the same text."""
    async with stage_on(tiny_model) as stage:
        for cap in range(1, NUM_TOKENS + 1):
            off = await stage.ask(0, max_tokens=cap)
            on = await stage.ask(K, max_tokens=cap)
            assert values(on) == values(off) == values(stage.off)[:cap]
            assert (on.text, on.reason) == (off.text, "LENGTH")
            if cap > 2:
                assert on.finish.speculation.accepted > 0
        whole = await stage.ask(K)
        assert whole.finish.speculation.rounds <= -(-NUM_TOKENS // (K + 1)) + 1


async def test_stop_tokens_at_every_place_of_a_block(tiny_model: Path) -> None:
    """The stop is the last id, it is charged, and nothing behind it is."""
    async with stage_on(tiny_model) as stage:
        ids = stage.off.ids
        for stop in dict.fromkeys(ids):
            off = await stage.ask(0, stop_token_ids=[stop])
            on = await stage.ask(K, stop_token_ids=[stop])
            assert on.ids == ids[: ids.index(stop) + 1]
            assert values(on) == values(off)
            assert (on.text, on.reason) == (off.text, "STOP")


async def test_stop_strings_at_every_place_of_a_block(tiny_model: Path) -> None:
    """The tokens up to the one that completes the stop string are delivered and charged, those
    behind it in the same block are neither."""
    async with stage_on(tiny_model) as stage:
        for stop in dict.fromkeys(delta for delta in stage.off.text if delta != "\ufffd"):
            off = await stage.ask(0, stop=[stop])
            on = await stage.ask(K, stop=[stop])
            assert on.reason == "STOP"
            assert on.text == stage.off.text[: stage.off.text.index(stop)]
            assert (values(on), on.text) == (values(off), off.text)
            usage = [answer.finish.usage for answer in (on, off, stage.off)]
            assert usage[0] == usage[1]
            # The prompt has been here before, and that is said also when a stop string ends it.
            assert usage[0].cached_prompt_tokens == 16


async def test_one_token_has_its_text(tiny_model: Path) -> None:
    """A cap of one: the token that the prompt's own step made, and its text."""
    async with stage_on(tiny_model) as stage:
        for k in (0, K):
            answer = await stage.ask(k, max_tokens=1)
            assert answer.ids == stage.off.ids[:1]
            expected = await stage.gateway.stub.Detokenize(pb.DetokenizeRequest(ids=answer.ids))
            assert answer.text == expected.text


async def test_several_choices_are_summed(tiny_model: Path) -> None:
    """Each choice counts its own tokens, the first one the prompt's."""
    async with stage_on(tiny_model) as stage:
        answer = await stage.ask(K, n=3, max_tokens=9)
        assert values(answer) == values(stage.off)[:9]
