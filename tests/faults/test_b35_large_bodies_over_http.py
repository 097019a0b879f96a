"""B35 over HTTP: a body that does not fit, and large ones that do.

Right: what the limits allow works, in and out; what is larger is refused with 413 while it comes,
reaches a client that first sends everything, and costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateways import gateway_on
from tests.support.http_gateway import CHAT, COMPLETIONS, HttpGateway
from tests.support.http_streams import HttpStream, completion, http_front
from tests.support.in_process import Target, running_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import random_prompts
from tests.support.token_streams import assert_counts_balance, quiet_status

pytestmark = pytest.mark.timeout(60)

MIB = 2**20
HUGE = 64 * MIB
PART = 64 * 1024
TOP = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for a prompt of 8,000 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=8192)


@contextlib.asynccontextmanager
async def stack(model: Path) -> AsyncIterator[tuple[HttpGateway, Target]]:
    """A gateway before a real target."""
    async with (
        running_target(model, kv_tokens=16384) as target,
        gateway_on(model, [target.address], http_port=0) as gateway,
        http_front(gateway) as http,
    ):
        await gateway.wait_health(True)
        yield http, target


async def send_huge(http: HttpGateway, *, chunked: bool) -> int:
    """64 MB to the end, whatever is answered meanwhile; the status that is read then."""
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {HUGE}"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n"
    client = await http.client()
    await client.write(head.encode())
    part = b" " * PART
    part = b"%x\r\n%b\r\n" % (PART, part) if chunked else part
    for _ in range(HUGE // PART):
        await client.write(part)
    answer = await client.raw_answer(b"")
    assert "max_message_bytes" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    return answer.status


async def test_a_huge_body_is_refused_and_harms_nobody(model: Path) -> None:
    """64 MB, told beforehand and not: 413, while a stream beside it goes on as if it were alone,
    and nothing of it is kept."""
    async with stack(model) as (http, target):
        body = completion([5, 6], 250)
        alone, beside = [await HttpStream.open(http.server.port, body) for _ in range(2)]
        await alone.read_all()
        await beside.read_first()
        reading = asyncio.create_task(beside.read_all())
        refused = [send_huge(http, chunked=chunked) for chunked in (False, True)]
        assert await asyncio.gather(*refused) == [413, 413]
        await reading
        assert beside.whole
        assert beside.text == alone.text
        assert (await http.ask("GET", "/readyz")).status == 200
        assert_counts_balance(await quiet_status(target))
        alone.close()
        beside.close()


@pytest.mark.parametrize("top", [None, TOP])
async def test_a_prompt_of_8000_tokens_fits(top: int | None, model: Path) -> None:
    """As ids, with and without alternatives for the tokens of the answer."""
    async with stack(model) as (http, _):
        prompt = random_prompts([8000])[0]
        answer = await http.ask("POST", COMPLETIONS, completion(prompt, 4, logprobs=top))
        assert answer.status == 200
        assert answer.json["usage"]["prompt_tokens"] == 8000
        assert answer.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "num_tokens",
    [300, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
async def test_a_whole_answer_with_twenty_alternatives_a_token(
    path: str, num_tokens: int, model: Path
) -> None:
    """It comes in one piece, every token with its alternatives, and probes are answered while it
    is made."""
    body = completion("Hello", num_tokens, logprobs=TOP)
    if path == CHAT:
        body |= {"logprobs": True, "top_logprobs": TOP}
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    async with stack(model) as (http, _):
        client, probe = await http.client(), await http.client()
        asking = asyncio.create_task(client.ask("POST", path, body))
        while not asking.done():
            assert (await asyncio.wait_for(probe.ask("GET", "/readyz"), 0.5)).status == 200
            await asyncio.sleep(0.05)
        answer = await asking
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == num_tokens
        logprobs = answer.json["choices"][0]["logprobs"]
        if path == CHAT:
            tops = [each["top_logprobs"] for each in logprobs["content"]]
            assert {len(each) for each in tops} == {TOP}
        else:
            tops = logprobs["top_logprobs"]
            assert all(1 <= len(each) <= TOP + 1 for each in tops)  # those that read alike are one
        assert len(tops) == num_tokens


ODD_BODIES = {
    "ids": b'{"model": "tiny", "prompt": [%b]}' % b",".join([b"5"] * 2_000_000),
    "objects": b'{"model": "tiny", "prompt": [%b]}' % b",".join([b"{}"] * 1_300_000),
    "fields": b'{"model": "tiny", %b}' % b",".join(b'"k%d":1' % i for i in range(300_000)),
    "bias": b'{"model": "tiny", "prompt": "x", "logit_bias": {%b}}'
    % b",".join(b'"%d":1' % i for i in range(350_000)),
    "messages": b'{"model": "tiny", "prompt": "x", "messages": [%b]}'
    % b",".join([b'{"role": "user", "content": ""}'] * 110_000),
}


@pytest.mark.parametrize("what", ODD_BODIES)
async def test_odd_bodies_of_the_largest_size_hold_up_nobody(what: str, model: Path) -> None:
    """Four at once of nearly 4 MiB that ask for nothing sensible: 400 for each, and probes and
    short requests beside them do not wait until all are understood."""
    async with stack(model) as (http, _):
        body = ODD_BODIES[what]
        assert 3 * MIB < len(body) < 4 * MIB
        clients = [await http.client() for _ in range(4)]
        path = CHAT if what == "messages" else COMPLETIONS
        asking = [asyncio.create_task(each.ask("POST", path, body)) for each in clients]
        probe, num_short = await http.client(), 0
        while not all(task.done() for task in asking):
            assert (await probe.ask("GET", "/readyz")).status == 200
            assert (await probe.ask("POST", COMPLETIONS, completion("Hello", 1))).status == 200
            num_short += 1
            await asyncio.sleep(0.02)
        for answer in await asyncio.gather(*asking):
            assert answer.status == 400
            assert answer.error["param"]
        assert num_short > 1
