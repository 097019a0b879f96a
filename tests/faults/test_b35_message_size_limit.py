"""B35: a message does not fit.

Symptom: RESOURCE_EXHAUSTED, but only for a full batch, many drafts or a long prompt, so that it
looks like a drafter that fails now and then; usually the limit was raised on one side only. Right:
everything that the limits allow fits, with drafts in use; what is larger is refused with
RESOURCE_EXHAUSTED and harms nobody else; both directions of a service have one finite limit from
one setting, and a service whose largest message could exceed it does not start. Reported in public
of serving frameworks: a limit raised at one end, and one that was simply taken away.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.service import DraftService
from gateway.service import GatewayService
from outrider.serving.channel import open_channel, server_options
from outrider.serving.server import listening
from outrider.serving.settings import (
    DraftSettings,
    GatewaySettings,
    SettingsError,
    TargetSettings,
)
from protos.outrider.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    target_pb2_grpc,
)
from target_service.message_sizes import check_message_limit
from tests.support.gateways import gateway_on
from tests.support.in_process import HOST, running_target
from tests.support.precision import chosen_dtype
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import answer_all, make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import OFF, assert_counts_balance, greedy, quiet_status

pytestmark = pytest.mark.timeout(60)

MIB = 2**20
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
REJECTION = sampling_pb2.SpeculationParams.VERIFICATION_REJECTION


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for a prompt of 8,000 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=8192)


async def check_drafts_fit(model: Path, num_sequences: int, k: int, num_tokens: int) -> None:
    """The target's own weights draft for it, and say from which distribution each token is."""
    draft = DraftService(
        DraftSettings(
            port=0,
            proposer="model",
            model=str(model),
            dtype=chosen_dtype(),
            kv_tokens=65536,
            max_window=256,
        )
    )
    async with (
        listening(draft, HOST, 0) as drafter,
        running_target(
            model,
            f"{HOST}:{drafter.port}",
            kv_tokens=65536,
            max_draft_tokens=64,
            max_window=256,
            step_tokens=2560,
        ) as target,
    ):
        await wait_for_drafters(target)
        requests = []
        for i, prompt in enumerate(random_prompts([12] * num_sequences)):
            request = make_request(prompt, num_tokens, k=k, temperature=1.0, seed=i)
            request.speculation.verification = REJECTION
            requests.append(request)
        answers = await answer_all(target, requests)
        assert all(answer.speculation.accepted > 0 for answer in answers)
        assert all(len(answer.ids) == num_tokens for answer in answers)
        status = await quiet_status(target)
        assert_counts_balance(status)
        (drafter_status,) = status.drafters
        assert drafter_status.state == "ready"
        assert drafter_status.connect_attempts == 1, "a frame that was too large ended the stream"


@pytest.mark.parametrize(("num_sequences", "k"), [(2, 8), (3, 8)])
async def test_drafts_with_their_distributions_fit(num_sequences: int, k: int, model: Path) -> None:
    """A few sequences with 8 drafts each: used, over one stream that never breaks."""
    await check_drafts_fit(model, num_sequences, k, 40)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_most_drafts_of_the_fullest_batch_fit(model: Path) -> None:
    """32 sequences with 64 drafts each."""
    await check_drafts_fit(model, 32, 64, 200)


@pytest.mark.parametrize("prompt_logprobs", [None, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_prompt_of_8000_tokens_fits(prompt_logprobs: int | None, model: Path) -> None:
    """In at the gateway, through the target, with twenty alternatives for every token."""
    async with (
        running_target(model, kv_tokens=16384) as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        prompt = random_prompts([8000])[0]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StoppingParams(max_tokens=4, ignore_eos=True),
            logprobs=20,
            prompt_logprobs=prompt_logprobs,
        )
        answer = await gateway.ask(request, 50)
        assert len(answer.ids) == 4
        assert answer.finish.usage.prompt_tokens == 8000


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_2000_tokens_with_twenty_alternatives_each_fit(model: Path) -> None:
    """A long answer, every token of which is large."""
    async with running_target(model, kv_tokens=16384) as target:
        request = greedy([5, 6, 7], 2000, OFF)
        request.logprobs = 20
        answer = await target.answer(request, 200)
        assert all(len(token.top) == 20 for token in answer.tokens)
        assert len(answer.tokens) == 2000


def huge_calls(gateway: grpc.aio.Channel, target: grpc.aio.Channel, draft: grpc.aio.Channel) -> Any:
    """A message of 64 MB to each service."""
    huge = "x" * (64 * MIB)
    ids = [2**32 - 1] * (13 * MIB)  # five bytes each
    yield inference_pb2_grpc.InferenceStub(gateway).Generate(
        inference_pb2.GenerateRequest(text=huge), timeout=20
    )
    yield target_pb2_grpc.TargetStub(target).Generate(greedy(ids, 5), timeout=20)
    update = draft_pb2.SequenceUpdate(sequence_id=1, tokens=ids)
    frames = iter([draft_pb2.SpeculateRequest(updates=[update])])
    yield draft_pb2_grpc.DraftStub(draft).Speculate(frames, timeout=20)


async def test_a_huge_message_is_refused_and_harms_nobody(model: Path) -> None:
    """64 MB to each of the three services, from a client without limits: RESOURCE_EXHAUSTED, while
    a stream beside it goes on."""
    async with (
        listening(DraftService(DraftSettings(port=0)), HOST, 0) as drafter,
        running_target(model, f"{HOST}:{drafter.port}", kv_tokens=16384) as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        expected = await target.ids(greedy([5, 6], 250))
        beside = asyncio.create_task(target.ids(greedy([5, 6], 250)))
        addresses = (gateway.address, target.address, f"{HOST}:{drafter.port}")
        channels = [grpc.aio.insecure_channel(each, options=UNLIMITED) for each in addresses]
        for call in huge_calls(*channels):
            assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await beside == expected
        await asyncio.gather(*(channel.close() for channel in channels))
        status = await target.status()
        assert status.load.failed == 0
        assert [each.connect_attempts for each in status.drafters] == [1]


@pytest.mark.parametrize("settings", [TargetSettings, GatewaySettings, DraftSettings])
def test_the_limit_is_one_finite_setting(settings: type) -> None:
    """Each service has it, with a default that is no larger than what peers accept unasked, and
    neither 0 nor -1, gRPC's word for no limit, is taken."""
    limit = settings().max_message_bytes
    assert 0 < limit <= 4 * MIB
    for bad in (-1, 0, 2**31):
        with pytest.raises(SettingsError, match="max_message_bytes"):
            settings(max_message_bytes=bad)


def test_both_ends_and_both_directions_have_the_same_limit() -> None:
    """The number goes into a server's two limits as it is."""
    options = dict(server_options(123_456))
    assert options["grpc.max_send_message_length"] == 123_456
    assert options["grpc.max_receive_message_length"] == 123_456


async def test_a_larger_limit_takes_larger_messages(model: Path) -> None:
    """What a target with the usual limit refuses, one with 16 MiB reads: here to say what is wrong
    with it."""
    ids = [5] * (5 * MIB)
    for limit, code in (
        (4 * MIB, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (16 * MIB, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        async with (
            running_target(model, max_message_bytes=limit) as target,
            open_channel(target.address, 16 * MIB) as channel,
        ):
            call = target_pb2_grpc.TargetStub(channel).Generate(greedy(ids, 5), timeout=20)
            assert await call.code() is code


GOOD = {"max_model_len": 8192, "step_tokens": 512, "max_draft_tokens": 8}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ""),
        ({"max_model_len": 2**20}, "max_model_len"),
        ({"step_tokens": 2**14}, "step_tokens"),
        ({"step_tokens": 2**13, "max_draft_tokens": 2**13}, "step_tokens"),
    ],
)
def test_what_could_exceed_the_limit_is_found_at_the_start(
    change: dict[str, int], named: str
) -> None:
    """The setting to lower is named, and so is what the limit would have to be."""
    if not named:
        check_message_limit(4 * MIB, **(GOOD | change))
        return
    with pytest.raises(SettingsError, match=rf"max_message_bytes must be at least \d+.*{named}"):
        check_message_limit(4 * MIB, **(GOOD | change))


async def test_a_service_whose_messages_could_exceed_the_limit_does_not_start(model: Path) -> None:
    """Target and gateway name the setting, which the command line makes one line of."""
    limit = 256 * 1024
    with pytest.raises(SettingsError, match="max_message_bytes must be at least"):
        async with running_target(model, max_message_bytes=limit, step_tokens=4096):
            pass
    with pytest.raises(SettingsError, match="max_message_bytes must be at least"):
        GatewayService(GatewaySettings(model=str(model), max_message_bytes=limit))
