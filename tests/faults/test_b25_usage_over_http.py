"""B25 over HTTP. Usage and ids that disagree with what was delivered.

Symptom and sources are those of the case over gRPC, beside this file.

Right: usage is that of OFF, the number of scores that came, and the rise of the counters of tokens,
the gateway's and the target's, but for what the target had begun when the gateway found a stop
string. A stream has one finish and no text behind it; then, if it was asked for, one event with the
usage and no choices; then the mark of the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protos.outrider.v1 import inference_pb2 as pb
from tests.support.draft_scripts import Drafting, Mute, Perfect
from tests.support.http_choices import HttpChoice, HttpChoices, ask_choices
from tests.support.http_gateway import CHAT, COMPLETIONS, HttpGateway
from tests.support.http_stacks import http_stack
from tests.support.in_process import Target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, random_prompts

PATHS = [CHAT, COMPLETIONS]
K = 6
NUM_TOKENS = 20
EOS = 2
(PROMPT,) = random_prompts([17], 300, seed=25)
MESSAGES = [{"role": "user", "content": "one river"}]
CHAT_SCORES = {"logprobs": True, "top_logprobs": 1}


@dataclass(frozen=True)
class Stage:
    """A gateway in front of a target whose drafter is always right."""

    http: HttpGateway
    target: Target
    drafter: ScriptedDrafter
    path: str
    prompt: list[int]
    longer: list[int]
    """What follows the prompt, for more tokens than are asked for."""

    def draft(self, ids: list[int]) -> None:
        """From now on the drafter proposes these behind the prompt."""
        self.drafter.behaviour = Drafting(Perfect({tuple(self.prompt): ids}))

    async def ask(
        self, k: int, *, stream: bool, with_usage: bool = True, **fields: Any
    ) -> HttpChoices:
        """Greedy, with scores: an answer that agrees with its own usage and with the counters."""
        body = {"messages": MESSAGES} | CHAT_SCORES
        if self.path == COMPLETIONS:
            body = {"prompt": PROMPT, "logprobs": 1}
        body |= {"temperature": 0, "seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body["speculation"] = {"mode": "fixed", "max_draft_tokens": k} if k else {"mode": "off"}
        before = await self.counted()
        answer = await ask_choices(
            self.http, self.path, body | fields, stream=stream, with_usage=with_usage
        )
        made, delivered = [new - old for new, old in zip(await self.counted(), before, strict=True)]
        num_scores = sum(len(choice.scores) for choice in answer.choices)
        assert delivered == num_scores
        assert made == num_scores or ("stop" in fields and made > num_scores)
        if answer.usage is not None:
            assert answer.usage["completion_tokens"] == num_scores
            assert answer.usage["prompt_tokens"] == len(self.prompt)
            assert answer.usage["total_tokens"] == len(self.prompt) + num_scores
        return answer

    async def counted(self) -> tuple[int, int]:
        """Tokens that the target has made, and those that the gateway has delivered."""
        made = (await self.target.status()).load.generated_tokens
        return made, self.http.gateway.service._metrics.totals.delivered_tokens

    async def ask_every_way(self, **fields: Any) -> HttpChoice:
        """The same with drafts and without, streamed with and without usage, and whole."""
        off = await self.ask(0, stream=False, **fields)
        for stream, with_usage in ((True, True), (True, False), (False, True)):
            on = await self.ask(K, stream=stream, with_usage=with_usage, **fields)
            assert [each.end for each in on.choices] == [each.end for each in off.choices]
            if on.usage is not None:
                for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    assert on.usage[name] == off.usage[name]
                if on.usage["completion_tokens"] > 2:
                    assert on.usage["speculation"]["accepted"] > 0
        return off.only


@contextlib.asynccontextmanager
async def stage_for(model: Path, path: str) -> AsyncIterator[Stage]:
    """The stage."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        http_stack(model, drafter.address) as (http, target),
    ):
        prompt = PROMPT
        if path == CHAT:
            chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in MESSAGES])
            tokenized = await http.gateway.stub.Tokenize(pb.TokenizeRequest(chat=chat))
            prompt = list(tokenized.ids)
        longer = await target.ids(make_request(prompt, NUM_TOKENS + K))
        stage = Stage(http, target, drafter, path, prompt, longer)
        stage.draft(longer)
        yield stage
        assert drafter.record.problems == []


@pytest.mark.parametrize("path", PATHS)
async def test_every_cap(tiny_model: Path, path: str) -> None:
    """From 1 token, which comes with its text, to 20: as many scores and charged tokens as OFF."""
    async with stage_for(tiny_model, path) as stage:
        every = (await stage.ask(0, stream=False)).only
        for cap in range(1, NUM_TOKENS + 1):
            answer = await stage.ask_every_way(max_tokens=cap)
            assert (answer.scores, answer.reason) == (every.scores[:cap], "length")
            ids = pb.DetokenizeRequest(ids=stage.longer[:cap])
            assert answer.text == (await stage.http.gateway.stub.Detokenize(ids)).text


@pytest.mark.parametrize("path", PATHS)
async def test_stop_strings_at_every_place_of_a_block(tiny_model: Path, path: str) -> None:
    """The tokens up to the one that completes the stop string are delivered and charged, those
    behind it in the same block are neither."""
    async with stage_for(tiny_model, path) as stage:
        text = (await stage.ask(0, stream=False)).only.text
        stops = list(dict.fromkeys(char for char in text if char != "\ufffd"))
        assert len(stops) > K
        for stop in stops:
            answer = await stage.ask_every_way(stop=stop)
            assert (answer.text, answer.reason) == (text[: text.index(stop)], "stop")
            if stop.isascii():  # else its bytes may be spread over several tokens
                assert stop in answer.scores[-1][0]


@pytest.mark.parametrize("path", PATHS)
async def test_the_end_at_every_place_of_a_block(tiny_model: Path, path: str) -> None:
    """An end-of-sequence token that was drafted: charged, without text, and nothing behind it."""
    async with stage_for(tiny_model, path) as stage:
        for place in range(1, 2 * K):
            ids = stage.longer[:place]
            stage.draft([*ids, EOS, *stage.longer[place:]])
            # It cannot come before this place, and there it must.
            answer = await stage.ask_every_way(
                min_tokens=place, logit_bias={str(EOS): 100}, ignore_eos=False
            )
            assert (len(answer.scores), answer.reason) == (place + 1, "stop")
            text = await stage.http.gateway.stub.Detokenize(pb.DetokenizeRequest(ids=ids))
            assert answer.text == text.text


@pytest.mark.parametrize("path", PATHS)
async def test_stop_tokens_at_every_place_of_a_block(tiny_model: Path, path: str) -> None:
    """The stop token is the last that is charged."""
    async with stage_for(tiny_model, path) as stage:
        ids = stage.longer[:NUM_TOKENS]
        for stop in dict.fromkeys(ids):
            answer = await stage.ask_every_way(stop_token_ids=[stop])
            assert (len(answer.scores), answer.reason) == (ids.index(stop) + 1, "stop")
