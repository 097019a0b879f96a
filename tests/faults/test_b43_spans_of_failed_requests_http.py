"""B43 through HTTP: spans that never end, or never were, for the requests that failed.

Right: as through gRPC, exactly one server span a request and service, ended once and soon, with the
end that the client met; at the gateway in the words of the conventions for HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.doors import chat_body, http_client, http_port
from tests.support.gateways import gateway_on, until
from tests.support.http_gateway import CHAT, Broken, HttpAnswer, HttpClient
from tests.support.otlp import Spans
from tests.support.processes import running_process
from tests.support.request_spans import (
    CANCELLED,
    FINISHED,
    Told,
    assert_ends,
    assert_of_http,
    failed,
    refused,
    told,
)
from tests.support.token_streams import quiet_status, slow_steps
from tests.support.traced_stack import ENDED_S, TracedStack, traced_stack

pytestmark = pytest.mark.timeout(60)

STEP_S = 0.02
Action = Callable[[TracedStack], Awaitable[None]]


async def ask(
    stack: TracedStack, body: object, headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """One request on a connection of its own."""
    async with http_client(http_port(stack.gateway)) as client:
        return await client.ask("POST", CHAT, body, headers)


async def complete(stack: TracedStack) -> None:
    """A stream that is read to its end, as slowly as it comes."""
    slow_steps(stack.target, STEP_S)
    started_s = time.monotonic()
    assert (await ask(stack, chat_body("river", 60))).events[-1] == "[DONE]"
    took_s = time.monotonic() - started_s
    await stack.wait_ended()
    (gateway,) = stack.spans.of("gateway")
    first_s = gateway.attributes["outrider.time_to_first_token_s"]
    assert first_s + 3 * STEP_S < gateway.duration_s <= took_s + 0.05


async def complete_in_one_piece(stack: TracedStack) -> None:
    """An answer that is no stream."""
    assert (await ask(stack, chat_body("river", 30, stream=False))).status == 200


async def leave(stack: TracedStack) -> None:
    """A client that has enough after the first events."""
    slow_steps(stack.target, STEP_S)
    async with http_client(http_port(stack.gateway)) as client:
        await client.send("POST", CHAT, chat_body("river", 400))
        answer = await client.head()
        while answer.body.count(b"data: ") < 3:
            assert await client.part(answer)


async def leave_at_once(stack: TracedStack) -> None:
    """Before anything has come: the target's step is not over yet."""
    slow_steps(stack.target, 0.5)
    async with http_client(http_port(stack.gateway)) as client:
        await client.send("POST", CHAT, chat_body("river", 400))
        batcher = stack.target.service.batcher
        await until(lambda: bool(batcher.scheduler.running))
        client.reset()


async def leave_one_piece(stack: TracedStack) -> None:
    """Tokens have come, and none was to be seen yet."""
    slow_steps(stack.target, STEP_S)
    async with http_client(http_port(stack.gateway)) as client:
        await client.send("POST", CHAT, chat_body("river", 400, stream=False))
        await until(lambda: stack.gateway.service._metrics.totals.generated_tokens > 3)


async def run_into_the_deadline(stack: TracedStack) -> None:
    """In the middle of a stream."""
    slow_steps(stack.target, STEP_S)
    async with http_client(http_port(stack.gateway)) as client:
        await client.send("POST", CHAT, chat_body("river", 400), {"X-Request-Timeout": "1"})
        answer = await client.head()
        await broken_off(client, answer)
        assert answer.events[-1]["error"]["code"] == "timeout"


async def have_no_time(stack: TracedStack) -> None:
    """The deadline passes before the first event."""
    slow_steps(stack.target, 0.6)
    headers = {"X-Request-Timeout": "0.2"}
    assert (await ask(stack, chat_body("river", 9), headers)).status == 504


async def broken_off(client: HttpClient, answer: HttpAnswer) -> None:
    """It ends, but not as a whole answer does."""
    with pytest.raises(Broken):
        while await client.part(answer):
            pass


async def lose_the_drafter(stack: TracedStack) -> None:
    """In the middle of the answer, which goes on without it."""
    slow_steps(stack.target, STEP_S)
    reading = asyncio.create_task(ask(stack, chat_body("river", 60)))
    await until(lambda: stack.gateway.service._metrics.totals.delivered_tokens > 10)
    await stack.drafter.drain()
    assert (await reading).events[-1] == "[DONE]"


async def never_read(stack: TracedStack) -> None:
    """The client asks for a stream, and that is all. The target is not done when that shows."""
    slow_steps(stack.target, 0.01)
    body = chat_body("river", 450, logprobs=True, top_logprobs=20)
    async with http_client(http_port(stack.gateway), receive_buffer=4096) as client:
        await client.send("POST", CHAT, body)
        totals = stack.gateway.service._metrics.totals
        await until(lambda: totals.started > 0 and not totals.running, timeout_s=30)


async def come_second(stack: TracedStack) -> None:
    """Another one runs, and there is no place left; that one's client leaves later."""
    slow_steps(stack.target, STEP_S)
    async with http_client(http_port(stack.gateway)) as client:
        await client.send("POST", CHAT, chat_body("sea", 400), {"X-Request-Id": "first"})
        await client.head()
        answer = await ask(stack, chat_body("river", 9))
        assert (answer.status, "retry-after" in answer.headers) == (429, True)


@dataclass(frozen=True)
class Case:
    """What is done, and what the spans of its request must say. None: there is no such span."""

    act: Action
    status: int | None
    """None: the client was gone before there was one."""
    gateway: Told
    target: Told | None = None
    draft: str | None = None
    """Its outcome. Not checked for a request that ends before its drafter can have heard of it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the target, and `gateway` of the gateway."""


CASES = {
    "complete": Case(complete, 200, FINISHED, FINISHED, "finished"),
    "one_piece": Case(complete_in_one_piece, 200, FINISHED, FINISHED, "finished"),
    "leave": Case(leave, 200, CANCELLED, CANCELLED, "finished"),
    "leave_at_once": Case(leave_at_once, None, CANCELLED, CANCELLED),
    "leave_one_piece": Case(leave_one_piece, None, CANCELLED, CANCELLED, "finished"),
    "deadline": Case(
        run_into_the_deadline,
        200,
        failed("deadline_exceeded"),
        ("cancelled", "deadline_exceeded", "error"),
        "finished",
    ),
    "no_time": Case(
        have_no_time, 504, failed("deadline_exceeded"), ("cancelled", "deadline_exceeded", "error")
    ),
    "draft_death": Case(lose_the_drafter, 200, FINISHED, FINISHED, "lost"),
    "never_read": Case(
        never_read,
        200,
        failed("unavailable"),
        CANCELLED,
        settings={"gateway": {"stall_s": 0.5}, "kv_tokens": 8192},
    ),
    "full_line": Case(
        come_second,
        429,
        refused("resource_exhausted"),
        refused("resource_exhausted"),
        settings={"max_sequences": 1, "max_waiting": 0},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_way_to_end_has_its_spans(tiny_model: Path, case: Case) -> None:
    """One a service, soon, with the right end; and none that was started and has not ended."""
    settings = dict(case.settings)
    front = {"http_port": 0} | settings.pop("gateway", {})
    async with traced_stack(tiny_model, gateway=front, **settings) as stack:
        await case.act(stack)
        gateway = await assert_ends(stack, case.gateway, case.target, case.draft)
        assert_of_http(gateway, case.status)


async def test_a_target_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Its own span dies with it; the gateway's says what happened."""
    spans = Spans()
    settings = {"tracing": spans.tracing("gateway"), "http_port": 0}
    async with (
        running_process(
            "target", tmp_path, model=tiny_model, drafters="", kv_tokens=4096
        ) as target,
        gateway_on(tiny_model, [target.address], **settings) as gateway,
    ):
        await gateway.wait_health(True)
        async with http_client(http_port(gateway)) as client:
            await client.send("POST", CHAT, chat_body("river", 450))
            answer = await client.head()
            target.kill()
            await broken_off(client, answer)
            assert answer.events[-1]["error"]["code"] == "unavailable"
        await spans.wait(lambda: spans.of("gateway"), ENDED_S)
    (span,) = spans.all
    assert told(span) == ("failed", "unavailable", "error")
    assert_of_http(span, 200)
    assert spans.num_started == 1


async def results_of_leaving(model: Path, traced: bool) -> list[Any]:
    """How requests end, by both ends' accounts, whose clients leave in each of four ways."""
    results: list[Any] = []
    async with traced_stack(model, traced=traced, gateway={"http_port": 0}) as stack:
        for act in (leave, leave_one_piece, run_into_the_deadline, leave_at_once):
            await act(stack)
            await quiet_status(stack.target)
        load = (await quiet_status(stack.target)).load
        results.append((load.started, load.finished, load.failed, load.cancelled, load.refused))
        totals = stack.gateway.service._metrics.totals
        await until(lambda: not totals.running)
        results.append({outcome.value: count for outcome, count in totals.ended.items()})
    return results


async def test_requests_end_the_same_with_tracing_and_without(tiny_model: Path) -> None:
    """Between events, before the only piece, at a deadline, before the first event."""
    without = await results_of_leaving(tiny_model, traced=False)
    assert await results_of_leaving(tiny_model, traced=True) == without
    assert without[0] == (4, 0, 0, 4, 0)
    assert without[1] == {"finished": 0, "failed": 1, "cancelled": 3, "refused": 0}
