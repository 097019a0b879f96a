"""Traces in a backend that nobody here wrote: what three service processes send by OTLP is read
back from Arize Phoenix, and says what the clients saw.

Links are not asked for: Phoenix keeps none (tests/faults/test_b42_mixed_traces.py looks at them).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2
from tests.support.phoenix import StoredSpan, phoenix_python, running_phoenix
from tests.support.processes import running_process
from tests.support.tiny_models import make_tiny_model
from tests.support.traced_stack import chat_request
from tests.support.venvs import INSTALL_S

# The first run has Phoenix to install.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + 480)]

PROJECT = "outrider-test"
PARTS = ("queue", "prefill", "decode")
NUM_SPANS = 3 + len(PARTS)
"""Of a request: one a service, and the target's parts."""
GIVEN, NONE, MALFORMED, NOT_SAMPLED = "given", "none", "malformed", "not sampled"
CALLERS = (GIVEN, NONE, GIVEN, MALFORMED, GIVEN, NOT_SAMPLED, NONE, GIVEN, NONE, GIVEN)


@dataclass(frozen=True)
class Asked:
    """One request, and what its client saw."""

    request: pb.GenerateRequest
    caller: str
    trace_id: str
    parent_span_id: str
    """Both are the caller's, and count where it says them well."""
    finish: pb.GenerateFinish
    num_tokens: int


@pytest.fixture(scope="module")
def phoenix_interpreter() -> Path:
    """Of the environment that Phoenix is installed in."""
    return phoenix_python()


def make_request(number: int) -> pb.GenerateRequest:
    """Each reads and writes another number of tokens; every second one is a chat."""
    words = " ".join(["one river runs"] * (number + 2))
    request = chat_request(words, 40 + 10 * number, request_id=f"r{number}")
    if number % 2:
        request.text = words
    return request


async def ask(stub: inference_pb2_grpc.InferenceStub, number: int, caller: str) -> Asked:
    """One request from its beginning to its end."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {
        GIVEN: f"00-{trace_id}-{span_id}-01",
        NOT_SAMPLED: f"00-{trace_id}-{span_id}-00",
        MALFORMED: f"00-{trace_id}-{'0' * 16}-01",
    }
    metadata = (("traceparent", headers[caller]),) if caller in headers else ()
    request = make_request(number)
    call = stub.Generate(request, metadata=metadata, timeout=60)
    responses = [response async for response in call]
    assert await call.code() is grpc.StatusCode.OK
    num_tokens = sum(len(response.chunk.tokens) for response in responses)
    return Asked(request, caller, trace_id, span_id, responses[-1].finish, num_tokens)


@contextlib.asynccontextmanager
async def traced_gateway(
    model: Path, folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A gateway, a target and a drafter, each a process with this environment; all are ready."""
    async with (
        running_process("draft", folder, environment=environment) as draft,
        running_process(
            "target",
            folder,
            environment=environment,
            model=model,
            drafters=draft.address,
            kv_tokens=8192,
        ) as target,
        running_process(
            "gateway", folder, environment=environment, model=model, targets=target.address
        ) as gateway,
    ):
        await gateway.wait_serving()
        await target.wait_event("drafter ready")
        async with open_channel(gateway.address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)


def assert_one_tree(spans: list[StoredSpan], asked: Asked, model: str) -> None:
    """gateway > target > its parts and the draft; each within the time of the one above it."""
    operation = asked.request.WhichOneof("input").replace("text", "text_completion")
    by_name = {span.name: span for span in spans}
    gateway, target = by_name[f"{operation} {model}"], by_name[f"generate {model}"]
    parts, draft = [by_name[name] for name in PARTS], by_name["draft ngram"]
    assert len(by_name) == len(spans) == NUM_SPANS
    assert gateway.parent_span_id == (asked.parent_span_id if asked.caller == GIVEN else "")
    assert target.parent_span_id == gateway.span_id
    assert {span.parent_span_id for span in [*parts, draft]} == {target.span_id}
    moments = [gateway.start, target.start, *(part.start for part in parts)]
    assert moments == sorted(moments)
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert target.start <= draft.start
    assert parts[-1].end <= target.end <= gateway.end
    for span in spans:
        assert span.start <= span.end
        assert span.status == "UNSET"


def assert_attributes_agree(spans: list[StoredSpan], asked: Asked) -> None:
    """What the spans count is what the client was told, and was sent."""
    usage, speculation = asked.finish.usage, asked.finish.speculation
    counted = {
        "outrider.request_id": asked.request.request_id,
        "outrider.outcome": "finished",
        "outrider.rounds": speculation.rounds,
        "outrider.drafted": speculation.drafted,
        "outrider.accepted": speculation.accepted,
    }
    assert usage.completion_tokens == asked.num_tokens == asked.request.stopping.max_tokens
    attributes = {span.name.partition(" ")[0]: span.attributes for span in spans}
    gateway = attributes.get("chat") or attributes["text_completion"]
    for service in (gateway, attributes["generate"]):
        assert service | counted == service
    of_the_gateway = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": ["length"],
        # Phoenix's own names, which it finds out from the conventions'.
        "llm.token_count.prompt": usage.prompt_tokens,
        "llm.token_count.completion": usage.completion_tokens,
        "gen_ai.request.max_tokens": asked.request.stopping.max_tokens,
        "gen_ai.request.temperature": 0,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
    }
    assert gateway | of_the_gateway == gateway
    target = attributes["generate"]
    assert target["outrider.prompt_tokens"] == usage.prompt_tokens
    assert target["outrider.generated_tokens"] == usage.completion_tokens
    assert "llm.token_count.prompt" not in target  # counted once a trace
    draft = attributes["draft"]
    assert draft["outrider.prompt_len"] == usage.prompt_tokens
    assert draft["outrider.outcome"] == "finished"
    assert draft["outrider.proposed_tokens"] >= speculation.drafted
    (decode,) = (span for span in spans if span.name == "decode")
    assert {event["name"] for event in decode.events} == {"round"}
    first_round = decode.events[0]["attributes"]
    assert first_round["outrider.base_len"] == usage.prompt_tokens + 1


def assert_gone(pid: int) -> None:
    """No process has that id, nor belongs to the group of the one that had."""
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


async def test_phoenix_shows_what_clients_saw(phoenix_interpreter: Path, tmp_path: Path) -> None:
    """Ten requests side by side and one after them, with drafts: each has one trace through all
    services, a caller's trace goes on, a malformed or missing one is replaced, and one that is not
    sampled is nowhere."""
    model = make_tiny_model(tmp_path / "tiny", max_len=1024)
    async with (
        running_phoenix(phoenix_interpreter, PROJECT) as phoenix,
        traced_gateway(model, tmp_path, phoenix.environment) as stub,
    ):
        side_by_side = (ask(stub, *each) for each in enumerate(CALLERS))
        asked = await asyncio.gather(*side_by_side)
        # Its spans come behind all others: when they are there, nothing is under way.
        asked.append(await ask(stub, len(CALLERS), NONE))
        sampled = {each.request.request_id: each for each in asked if each.caller != NOT_SAMPLED}
        spans = await phoenix.wait_spans(NUM_SPANS * len(sampled))
    assert_gone(phoenix.process.pid)

    assert all(each.finish.reason == sampling_pb2.FINISH_REASON_LENGTH for each in asked)
    assert sum(each.finish.speculation.accepted for each in asked) > 0
    assert len({span.span_id for span in spans}) == len(spans)
    sizes = Counter(span.trace_id for span in spans)
    assert set(sizes.values()) == {NUM_SPANS} and len(sizes) == len(sampled)
    for trace_id in sizes:
        trace = [span for span in spans if span.trace_id == trace_id]
        ids = {span.attributes.get("outrider.request_id") for span in trace} - {None}
        each = sampled.pop(*ids)
        assert (trace_id == each.trace_id) == (each.caller == GIVEN)
        assert_one_tree(trace, each, model.name)
        assert_attributes_agree(trace, each)
    assert sampled == {}
