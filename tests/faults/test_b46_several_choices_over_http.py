"""B46 over HTTP. Several choices of one request.

Symptom and sources are those of the case over gRPC, beside this file.

Right: different choices with index 0 to n-1, each with one finish and a seed of its own, which
gives it again; one mark of the end; usage summed, the prompt counted once; the same request gives
the same choices, streamed or whole; after clients have left the pool is at its baseline; an
impossible number is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider_kernels.noise import child_seed
from tests.support.gateways import until
from tests.support.http_choices import ask_choices
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, HttpGateway
from tests.support.http_stacks import full_http_stack, http_stack
from tests.support.token_requests import random_prompts
from tests.support.token_streams import assert_counts_balance, quiet_status

PATHS = [CHAT, COMPLETIONS]
N = 3
SEED = 7
SCORES: dict[str, dict[str, Any]] = {CHAT: {"logprobs": True}, COMPLETIONS: {"logprobs": 0}}
(PROMPT,) = random_prompts([70])


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    """Some ids end a choice, so that the choices end at different lengths."""
    body = BODIES[path] | SCORES[path] | {"stop_token_ids": list(range(3, 20))}
    if path == COMPLETIONS:
        body |= {"prompt": PROMPT}
    return body | {"temperature": 1.0, "seed": SEED, "max_tokens": 60, "ignore_eos": True} | fields


@pytest.mark.parametrize("path", PATHS)
async def test_three_choices(tiny_model: Path, path: str) -> None:
    """Distinct texts of different lengths, the same each time, streamed or whole, with drafts and
    without; each is what its own seed gives; the prompt counts once."""
    async with full_http_stack(tiny_model) as (http, _):
        whole = await ask_choices(http, path, body_for(path, n=N), stream=False)
        assert [choice.seed for choice in whole.choices] == [child_seed(SEED, i) for i in range(N)]
        assert len({choice.text for choice in whole.choices}) == N
        assert len({len(choice.scores) for choice in whole.choices}) > 1
        solo = [
            await ask_choices(http, path, body_for(path, seed=choice.seed), stream=True)
            for choice in whole.choices
        ]
        ends = [each.only.end for each in solo]
        assert [choice.end for choice in whole.choices] == ends
        num_prompt = solo[0].usage["prompt_tokens"]
        num_made = sum(len(choice.scores) for choice in whole.choices)
        for stream in (True, False):
            for speculation in (None, {"mode": "off"}, {"mode": "fixed", "max_draft_tokens": 4}):
                body = body_for(path, n=N, speculation=speculation)
                again = await ask_choices(http, path, body, stream=stream)
                assert [choice.end for choice in again.choices] == ends
                usage = again.usage
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                    num_prompt,
                    num_made,
                )
                assert usage["total_tokens"] == num_prompt + num_made


@pytest.mark.parametrize("path", PATHS)
async def test_choices_of_a_stream_come_side_by_side(tiny_model: Path, path: str) -> None:
    """No choice waits for the end of another, and a stop string that ends one early leaves the
    others alone."""
    async with http_stack(tiny_model) as (http, _):
        body = body_for(path, n=N)
        plain = await ask_choices(http, path, body, stream=True)
        answer = await http.ask("POST", path, body | {"stream": True, "stop_token_ids": []})
        order = [event["choices"][0]["index"] for event in answer.events[:-1]]
        firsts = [order.index(index) for index in range(N)]
        lasts = [len(order) - 1 - order[::-1].index(index) for index in range(N)]
        assert max(firsts) < min(lasts)
        text = max((choice.text for choice in plain.choices), key=len)
        stop = text[3:6]
        for stream in (True, False):
            stopped = await ask_choices(http, path, body | {"stop": stop}, stream=stream)
            assert [choice.text for choice in stopped.choices] == [
                choice.text.partition(stop)[0] for choice in plain.choices
            ]


async def leave_midway(http: HttpGateway, path: str, turn: int) -> None:
    """One of four ways: a stream or a whole answer, in good order or not, each time later."""
    stream = turn % 2 == 0
    body = body_for(path, n=N, max_tokens=300, stop_token_ids=[], stream=stream)
    client = await http.client()
    await client.send("POST", path, body)
    if stream:
        answer = await client.head()
        for _ in range(turn // 7):
            assert await client.part(answer)
    else:
        await until(lambda: http.gateway.num_running > 0)
    if turn % 4 < 2:
        client.close()
    else:
        client.reset()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", PATHS)
async def test_clients_that_leave_end_all_choices(tiny_model: Path, path: str) -> None:
    """Fifty that leave at different moments: no place and no block stays, and counts balance."""
    async with full_http_stack(tiny_model, step_tokens=32) as (http, target):
        for turn in range(50):
            await leave_midway(http, path, turn)
        status = await quiet_status(target, timeout_s=10)
        await until(lambda: http.gateway.num_running == 0)
        assert_counts_balance(status)
        assert status.load.cancelled + status.load.finished == status.load.started
        assert all(each.sequences == 0 for each in status.drafters)
        answer = await ask_choices(http, path, body_for(path, n=N), stream=True)
        assert len(answer.choices) == N


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [0, -1, 17, 10**6, 1.5, "3", True])
async def test_an_impossible_number_is_refused(tiny_model: Path, path: str, n: object) -> None:
    """400 that names the field, streamed or not, before anything starts."""
    async with http_stack(tiny_model) as (http, target):
        for stream in (True, False):
            answer = await http.ask("POST", path, BODIES[path] | {"n": n, "stream": stream})
            assert (answer.status, answer.error["param"]) == (400, "n")
        assert (await target.status()).load.started == 0


async def test_more_choices_than_there_are_places(tiny_model: Path) -> None:
    """What the target can never hold is refused by the field's name too, never silently cut."""
    async with http_stack(tiny_model, max_sequences=2, max_waiting=2) as (http, _):
        answer = await http.ask("POST", CHAT, body_for(CHAT, n=5))
        assert (answer.status, answer.error["param"]) == (400, "n")
        four = await ask_choices(http, CHAT, body_for(CHAT, n=4), stream=True)
        assert len(four.choices) == 4
