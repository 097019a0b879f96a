"""Neither keys nor prompts are in a gateway's log, spans or metrics, whatever is done with it.

The gateway is a process of its own with its log at its loudest, so that what libraries write, on
either stream, is looked at as well.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc
from tests.support.doors import http_client
from tests.support.gateways import target_status
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, Broken, HttpClient
from tests.support.otlp import receiver
from tests.support.processes import ServiceProcess, running_process
from tests.support.scrapes import scrape_text
from tests.support.scripted_target import Script, serving
from tests.support.tiny_models import make_tiny_model

KEY, WRONG_KEY, PROMPT = "or-Key0f7hisTest", "or-Wr0ngKey", "Xylophone"
SECRETS = (KEY, WRONG_KEY, PROMPT)
HEADERS = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "Cookie": f"key={KEY}"}


def keys_file(folder: Path) -> Path:
    """One key."""
    file = folder / "keys.toml"
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    file.write_text(f'[[keys]]\nname = "test"\nsha256 = "{sha256}"\n')
    return file


async def ask_over_http(port: int) -> None:
    """Good requests, and all kinds of bad ones that hold a secret somewhere."""
    chat = BODIES[CHAT] | {"messages": [{"role": "user", "content": PROMPT}], "user": KEY}
    plain = BODIES[COMPLETIONS] | {"prompt": PROMPT}
    wrong = HEADERS | {"Authorization": f"bearer {WRONG_KEY}"}
    for status, path, body, headers in [
        (200, CHAT, chat, HEADERS),
        (200, CHAT, chat | {"stream": True}, HEADERS),
        (200, COMPLETIONS, plain, HEADERS),
        (401, COMPLETIONS, plain, wrong),
        (401, COMPLETIONS, plain, HEADERS | {"Authorization": KEY}),
        (401, CHAT, chat, {"X-Api-Key": KEY}),
        (400, CHAT, chat | {PROMPT: KEY}, HEADERS),
        (400, CHAT, chat | {"stop": [PROMPT] * 99}, HEADERS),
        (400, CHAT, chat | {"messages": [{"role": PROMPT, "content": PROMPT}]}, HEADERS),
        (400, CHAT, chat | {"logit_bias": {PROMPT: 1}}, HEADERS),
        (400, CHAT, f'{{"messages": "{PROMPT}", "{KEY}'.encode(), HEADERS),
        (400, COMPLETIONS, plain | {"prompt": PROMPT * 5000}, HEADERS),
        (415, CHAT, chat, HEADERS | {"Content-Type": f"{PROMPT}/{KEY}"}),
        (415, CHAT, chat, HEADERS | {"Content-Encoding": KEY}),
        (400, CHAT, chat, HEADERS | {"X-Request-Timeout": KEY}),
        (400, CHAT, chat, HEADERS | {"X-Request-Id": f"{KEY} {PROMPT}"}),
        (404, f"/v1/{KEY}/{PROMPT}?key={KEY}", chat, HEADERS),
        (404, f"/{PROMPT}", chat, HEADERS),
    ]:
        async with http_client(port) as client:
            answer = await client.ask("POST", path, body, headers)
            assert answer.status == status, (body, answer.body)
    for data in (
        f"GET {KEY}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\x01{PROMPT}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {KEY} {PROMPT}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\nX: {KEY * 3000}",
        f"GET /{KEY} HTTP/1.1\r\nHost: x\r\nUpgrade: {KEY}\r\nConnection: upgrade\r\n\r\n",
    ):
        async with http_client(port) as client:
            assert 400 <= (await client.raw_answer(data.encode())).status < 500
    for cut_short in (f"GET /?{KEY}", f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY}"):
        client = await HttpClient.connect(port)
        await client.write(cut_short.encode())
        client.reset()
    async with http_client(port) as client:  # leaves in the middle
        await client.send("POST", CHAT, chat | {"stream": True, "n": 8}, HEADERS)
        with contextlib.suppress(Broken):
            await client.head()


async def ask_over_grpc(address: str) -> None:
    """The same in short."""
    metadata = [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)]
    message = pb.ChatMessage(role=PROMPT, content=PROMPT)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.Generate(pb.GenerateRequest(text=PROMPT), metadata=metadata):
            pass
        await stub.Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=metadata)
        for request, headers in [
            (pb.GenerateRequest(text=PROMPT), [("authorization", f"Bearer {WRONG_KEY}")]),
            (pb.GenerateRequest(text=PROMPT), [("authorization", KEY)]),
            (pb.GenerateRequest(chat=pb.Chat(messages=[message])), metadata),
            (pb.GenerateRequest(text=PROMPT * 5000), metadata),
        ]:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(request, metadata=headers).read()
        rubbish = channel.unary_stream("/outrider.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            await rubbish(f"\xff{PROMPT}".encode("latin-1"), metadata=metadata).read()


def assert_silent(text: str, *allowed: str) -> None:
    """No secret is in it, but for those that may be."""
    for secret in SECRETS:
        where = text.find(secret)
        assert where < 0 or secret in allowed, text[max(0, where - 300) : where + 100]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("log_text", [False, True])
async def test_nothing_is_told(tiny_folder: Path, tmp_path: Path, log_text: bool) -> None:
    """Only `log_text` shows the prompt, and then the log alone."""
    settings = {
        "model": tiny_folder,
        "api_keys": keys_file(tmp_path),
        "log_level": "debug",
        "log_text": str(log_text).lower(),
    }
    async with receiver() as collector, serving(Script([5, 6, 7]), target_status(tiny_folder)) as t:
        environment = collector.spans.environment
        async with running_process(
            "gateway", tmp_path, environment=environment, targets=t.address, **settings
        ) as gateway:
            await gateway.wait_serving()
            await ask_over_http(gateway.http_port)
            await ask_over_grpc(gateway.address)
            metrics = await scrape_text(gateway.metrics_port)
            await end(gateway)
        spans = collector.spans.all
        # Four good ones, one that left, and those that were refused as requests for text.
        assert len(spans) == 4 + 1 + 18
    assert_silent(metrics)
    assert_silent(str(spans))
    assert_silent(gateway.output, *([PROMPT] if log_text else []))
    assert (PROMPT in gateway.output) is log_text
    lines = [line for line in gateway.events if line["event"] == "request"]
    assert len(lines) == len(spans)
    assert [line for line in gateway.events if line["level"] in ("warning", "error")] == []


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nothing_is_told_by_those_behind(tmp_path: Path) -> None:
    """Target and drafter get neither key nor text; what they write holds none."""
    model = make_tiny_model(tmp_path / "tiny")
    loud = {"log_level": "debug"}
    keys = keys_file(tmp_path)
    async with receiver() as collector:
        environment = collector.spans.environment
        traced = {"environment": environment} | loud
        async with (
            running_process("draft", tmp_path, **traced) as draft,
            running_process(
                "target", tmp_path, model=model, drafters=draft.address, kv_tokens=4096, **traced
            ) as target,
            running_process(
                "gateway", tmp_path, model=model, targets=target.address, api_keys=keys, **traced
            ) as gateway,
        ):
            await gateway.wait_serving()
            await ask_over_http(gateway.http_port)
            await ask_over_grpc(gateway.address)
            for service in (gateway, target, draft):
                assert_silent(await scrape_text(service.metrics_port))
                await end(service)
                assert_silent(service.output)
        assert {span.service for span in collector.spans.all} == {"gateway", "target", "draft"}
    assert_silent(str(collector.spans.all))


async def end(service: ServiceProcess) -> None:
    """In order, so that its last spans have left."""
    service.terminate()
    assert await service.wait_exit() == 0
