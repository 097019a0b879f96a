"""The three services as a user starts them: processes that talk gRPC, signals, plain errors."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from tests.support.processes import START_S, killed_at_end, running_process, spawn
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_len=4096)


def token_request(max_tokens: int) -> target_pb2.TokenRequest:
    """A greedy request that ends at its cap."""
    return target_pb2.TokenRequest(
        token_ids=[5, 6, 7],
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def generate(
    stub: inference_pb2_grpc.InferenceStub, mode: sampling_pb2.SpeculationParams.Mode
) -> list[inference_pb2.GenerateResponse]:
    """All messages of one greedy answer of 200 tokens."""
    request = inference_pb2.GenerateRequest(
        text="one river runs",
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(max_tokens=200, ignore_eos=True),
        speculation=sampling_pb2.SpeculationParams(
            mode=mode,
            max_draft_tokens=4 if mode == sampling_pb2.SpeculationParams.MODE_FIXED else None,
        ),
    )
    return [response async for response in stub.Generate(request, timeout=60)]


def ids_of(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    """The answer's token ids."""
    return [token.id for response in responses for token in response.chunk.tokens]


def assert_one_line_error(output: str, *words: str) -> None:
    """Plain words for a person: no traceback, one line that says what is wrong."""
    errors = [line for line in output.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1, output
    assert "Traceback" not in output
    for word in words:
        assert word in errors[0]


async def test_an_answer_streams_through_three_processes_and_all_of_them_drain(
    model: Path, tmp_path: Path
) -> None:
    """Text goes in at the gateway and comes out in pieces, with drafts used on the way; after
    SIGTERM each service ends with status 0 and without a traceback."""
    async with (
        running_process("draft", tmp_path) as draft,
        running_process(
            "target", tmp_path, model=model, drafters=draft.address, kv_tokens=4096
        ) as target,
        running_process("gateway", tmp_path, model=model, targets=target.address) as gateway,
    ):
        await gateway.wait_serving()
        await target.wait_event("drafter ready")
        async with open_channel(gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            plain = await generate(stub, sampling_pb2.SpeculationParams.MODE_OFF)
            drafted = await generate(stub, sampling_pb2.SpeculationParams.MODE_FIXED)
        assert len(drafted) > 2, "the answer came in one piece"
        assert ids_of(drafted) == ids_of(plain)
        finish = drafted[-1].finish
        assert finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        assert finish.usage.completion_tokens == 200
        assert finish.speculation.drafted > 0
        for process in (gateway, target, draft):
            process.terminate()
            assert await process.wait_exit() == 0, process.output
            assert "Traceback" not in process.output


async def test_an_open_stream_ends_well_while_the_target_drains(
    model: Path, tmp_path: Path
) -> None:
    """SIGTERM while a stream runs: the stream comes to its own end, a new request is refused with
    UNAVAILABLE, and the exit status is 0."""
    async with running_process(
        "target", tmp_path, model=model, drafters="", kv_tokens=4096
    ) as target:
        async with open_channel(target.address) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            call = stub.Generate(token_request(1000), timeout=60)
            chunks = [await call.read()]
            target.terminate()
            await target.wait_event("draining")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(token_request(5), timeout=10):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            while (chunk := await call.read()) is not grpc.aio.EOF:
                chunks.append(chunk)
        assert sum(len(chunk.tokens) for chunk in chunks) == 1000
        assert chunks[-1].finish.usage.completion_tokens == 1000
        assert await target.wait_exit() == 0, target.output
        assert "Traceback" not in target.output


async def test_a_second_signal_ends_a_draining_target_at_once(model: Path, tmp_path: Path) -> None:
    """A person who presses Ctrl-C twice does not wait for the grace period."""
    async with (
        running_process(
            "target",
            tmp_path,
            model=model,
            drafters="",
            kv_tokens=4096,
            stall_s=60,
            stream_tokens=1,
        ) as target,
        open_channel(target.address) as channel,
    ):
        call = target_pb2_grpc.TargetStub(channel).Generate(token_request(3000), timeout=60)
        await call.read()
        target.process.send_signal(signal.SIGINT)
        await target.wait_event("draining")
        started = asyncio.get_running_loop().time()
        target.process.send_signal(signal.SIGINT)
        assert await target.wait_exit(5) == 128 + signal.SIGINT
        assert asyncio.get_running_loop().time() - started < 2
        call.cancel()


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
async def test_a_taken_port_is_one_clear_line(service: str, model: Path, tmp_path: Path) -> None:
    """The address is named, nothing is traced back, the status is not 0."""
    settings = {"gateway": {"model": model}, "target": {"model": model, "drafters": ""}}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = spawn(service, tmp_path, port=port, **settings.get(service, {}))
        with killed_at_end(process):
            assert await process.wait_exit(START_S) > 0
    assert_one_line_error(process.output, service, f"127.0.0.1:{port}", "the port is taken")


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
async def test_a_bad_model_is_one_clear_line(service: str, tmp_path: Path) -> None:
    """A name that is no model and a folder that holds none are told by name."""
    empty = tmp_path / "empty-folder"
    empty.mkdir()
    extra = {"draft": {"proposer": "model"}, "target": {"drafters": ""}}.get(service, {})
    for model in ("no-such-model", empty):
        with killed_at_end(spawn(service, tmp_path, model=model, **extra)) as process:
            assert await process.wait_exit(START_S) > 0
        assert_one_line_error(process.output, service, Path(model).name)


async def test_an_unknown_variable_is_an_error(tmp_path: Path) -> None:
    """A typing error in a variable's name would else change nothing and say nothing."""
    environment = {"OUTRIDER_DRAFT_MAX_SEQUENCE": "3"}
    with killed_at_end(spawn("draft", tmp_path, environment=environment)) as process:
        assert await process.wait_exit(START_S) > 0
    assert_one_line_error(
        process.output, "OUTRIDER_DRAFT_MAX_SEQUENCE", "OUTRIDER_DRAFT_MAX_SEQUENCES"
    )


async def test_a_known_variable_sets_what_it_names(tmp_path: Path) -> None:
    """The variable of a setting has the flag's effect: here a value that is refused."""
    environment = {"OUTRIDER_DRAFT_NGRAM_MIN": "0"}
    with killed_at_end(spawn("draft", tmp_path, environment=environment)) as process:
        assert await process.wait_exit(START_S) > 0
    assert_one_line_error(process.output, "ngram_min", "at least 1")
