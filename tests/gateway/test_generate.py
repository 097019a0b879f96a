"""Generate over real gRPC, with a scripted target behind the gateway."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest

from gateway.tokenizer import ModelTokenizer
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import gateway_with, until
from tests.support.scripted_target import Script

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
def tokenizer(tiny_folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(tiny_folder)


@pytest.mark.parametrize("block", [1, 3, 100])
async def test_text_in_text_out(tiny_folder: Path, tokenizer: ModelTokenizer, block: int) -> None:
    """The client gets each token once and the text of all of them, however they were grouped."""
    ids = tokenizer.encode(TEXT)
    async with gateway_with(tiny_folder, Script(ids, block=block)) as (gateway, target):
        answer = await gateway.ask(pb.GenerateRequest(text="Say it:"))
    assert answer.text == TEXT
    assert answer.ids == ids
    assert answer.reason == "LENGTH"
    assert answer.finish.usage.prompt_tokens == len(tokenizer.encode("Say it:"))
    assert answer.finish.usage.completion_tokens == len(ids)
    assert answer.finish.speculation.accepted == sum(token.drafted for token in answer.tokens)
    (request,) = target.seen.requests
    assert list(request.token_ids) == tokenizer.encode("Say it:")


async def test_what_the_target_is_asked(tiny_folder: Path) -> None:
    """Settings arrive unchanged, stop strings stay here, and every field is set."""
    sampling = sampling_pb2.SamplingParams(
        temperature=0.8, top_k=5, top_p=0.95, seed=7, logit_bias={3: 1.5}
    )
    speculation = sampling_pb2.SpeculationParams(
        mode=sampling_pb2.SpeculationParams.MODE_FIXED, max_draft_tokens=4
    )
    stopping = sampling_pb2.StoppingParams(
        max_tokens=9, min_tokens=2, stop=["END"], stop_token_ids=[9], ignore_eos=True
    )
    request = pb.GenerateRequest(
        request_id="mine",
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=sampling,
        stopping=stopping,
        speculation=speculation,
        priority=-3,
    )
    async with gateway_with(tiny_folder, Script([7])) as (gateway, target):
        answer = await gateway.ask(request)
    assert answer.finish.seed == 7
    (asked,) = target.seen.requests
    assert (asked.request_id, list(asked.token_ids), asked.priority) == ("mine", [5, 6], -3)
    for name in ("temperature", "top_k", "top_p", "seed", "logit_bias"):
        assert getattr(asked.sampling, name) == getattr(sampling, name)
    assert asked.sampling.HasField("min_p") and asked.sampling.repetition_penalty == 1
    assert asked.speculation.mode == speculation.mode
    assert asked.speculation.max_draft_tokens == 4
    assert (asked.stopping.max_tokens, asked.stopping.min_tokens) == (9, 2)
    assert (list(asked.stopping.stop_token_ids), asked.stopping.ignore_eos) == ([9], True)
    assert not asked.stopping.stop


async def test_seeds_and_ids_are_drawn_when_missing(tiny_folder: Path) -> None:
    """Each request gets its own seed and id; the seed that the target used is told."""
    async with gateway_with(tiny_folder, Script([7])) as (gateway, target):
        answers = [await gateway.ask(pb.GenerateRequest(text="x")) for _ in range(3)]
    assert [answer.finish.seed for answer in answers] == [
        asked.sampling.seed for asked in target.seen.requests
    ]
    assert len({answer.finish.seed for answer in answers}) == 3
    assert len({asked.request_id for asked in target.seen.requests} - {""}) == 3


async def test_chat_goes_through_the_template(tiny_folder: Path, tokenizer: ModelTokenizer) -> None:
    """A chat becomes the template's prompt, ending where the assistant speaks."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="dog")])
    async with gateway_with(tiny_folder, Script([7])) as (gateway, target):
        await gateway.ask(pb.GenerateRequest(chat=chat))
        tokenized = await gateway.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    prompt = "<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n"
    assert list(target.seen.requests[0].token_ids) == tokenizer.encode(prompt)
    assert list(tokenized.ids) == tokenizer.encode(prompt)
    assert tokenized.tokens[0] == "<|im_start|>"


async def test_tokenize_and_detokenize(tiny_folder: Path, tokenizer: ModelTokenizer) -> None:
    """Text survives the way there and back; special tokens only when asked for."""
    async with gateway_with(tiny_folder, Script()) as (gateway, _):
        stub = gateway.stub
        tokenized = await stub.Tokenize(pb.TokenizeRequest(text=TEXT + "<|im_end|>"))
        ids = tokenized.ids
        assert list(ids) == [*tokenizer.encode(TEXT), 2]
        assert tokenized.tokens[-1] == "<|im_end|>" and tokenized.max_model_len == 256
        assert (await stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == TEXT
        kept = await stub.Detokenize(pb.DetokenizeRequest(ids=ids, keep_special=True))
        assert kept.text == TEXT + "<|im_end|>"
        with pytest.raises(grpc.aio.AioRpcError, match=r"ids\[1\]"):
            await stub.Detokenize(pb.DetokenizeRequest(ids=[5, 600]))
        with pytest.raises(grpc.aio.AioRpcError, match="input"):
            await stub.Tokenize(pb.TokenizeRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="ids: at most 1048576, got 1048577"):
            await stub.Detokenize(pb.DetokenizeRequest(ids=[5] * 1_048_577))


async def test_eos_ends_the_text_silently(tiny_folder: Path, tokenizer: ModelTokenizer) -> None:
    """The end token is delivered as a token and counted, and gives no text."""
    ids = [*tokenizer.encode("dog"), 2, 5]
    async with gateway_with(tiny_folder, Script(ids, block=100, eos_ids=[2])) as (gateway, _):
        answer = await gateway.ask(pb.GenerateRequest(text="x"))
    assert (answer.text, answer.reason, answer.ids) == ("dog", "STOP", ids[:-1])
    assert answer.finish.usage.completion_tokens == len(ids) - 1


async def test_half_a_character_at_the_end_is_flushed(
    tiny_folder: Path, tokenizer: ModelTokenizer
) -> None:
    """When the last token leaves a character unfinished, the end says so with U+FFFD."""
    ids = tokenizer.encode("dog\u2603")[:-1]
    async with gateway_with(tiny_folder, Script(ids)) as (gateway, _):
        answer = await gateway.ask(pb.GenerateRequest(text="x"))
    assert answer.text == tokenizer.decode(ids) == "dog\ufffd"


async def test_a_stop_string_ends_the_targets_work(
    tiny_folder: Path, tokenizer: ModelTokenizer
) -> None:
    """At the match the target is cancelled; statistics count what was delivered, no more."""
    ids = tokenizer.encode(TEXT * 4)
    script = Script(ids, block=5, delay_s=0.01)
    stopping = sampling_pb2.StoppingParams(stop=["fox"])
    async with gateway_with(tiny_folder, script) as (gateway, target):
        answer = await gateway.ask(pb.GenerateRequest(text="x", stopping=stopping))
        await asyncio.sleep(0.1)
        assert (target.seen.running, target.seen.cancelled) == (0, 1)
    assert (answer.text, answer.reason) == ("The quick brown ", "STOP")
    assert answer.ids == ids[: len(answer.ids)]
    assert "fox" in tokenizer.decode(answer.ids)
    assert "fox" not in tokenizer.decode(answer.ids[:-1])
    stats = answer.finish.speculation
    assert answer.finish.usage.completion_tokens == len(answer.ids)
    assert stats.accepted == sum(token.drafted for token in answer.tokens)
    assert stats.drafted == stats.accepted == sum(stats.accepted_per_position)


async def test_a_finished_target_call_counts_as_finished(tiny_folder: Path) -> None:
    """An answer that ends at the target is not cancelled there."""
    async with gateway_with(tiny_folder, Script([5, 6, 7])) as (gateway, target):
        for _ in range(10):
            await gateway.ask(pb.GenerateRequest(text="x"))
        assert (target.seen.finished, target.seen.cancelled) == (10, 0)


async def test_min_tokens_holds_for_stop_strings(
    tiny_folder: Path, tokenizer: ModelTokenizer
) -> None:
    """A stop string completed before min_tokens tokens is text like any other."""
    ids = [tokenizer.encode("o")[0]] * 6
    async with gateway_with(tiny_folder, Script(ids, block=4)) as (gateway, _):
        stopping = sampling_pb2.StoppingParams(stop=["oo"], min_tokens=4)
        answer = await gateway.ask(pb.GenerateRequest(text="x", stopping=stopping))
    assert (answer.text, answer.reason, len(answer.ids)) == ("oo", "STOP", 4)


async def test_reflection_lists_the_service(tiny_folder: Path) -> None:
    """Tools without our files find Inference by reflection."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with gateway_with(tiny_folder, Script()) as (gateway, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            names = [service.name for service in answer.list_services_response.service]
    assert "outrider.v1.Inference" in names and "grpc.health.v1.Health" in names


async def test_long_prompts_hold_up_no_short_one(tiny_folder: Path) -> None:
    """They are tokenized elsewhere: however many there are, a short one is answered at once."""
    released = threading.Event()
    async with gateway_with(tiny_folder, Script([5, 6, 7])) as (gateway, _):
        tokenizer = gateway.service._inference.model.tokenizer
        encode = tokenizer.encode

        def slow(text: str) -> list[int]:
            if len(text) > 100:
                assert released.wait(15)
            return encode(text)

        tokenizer.encode = slow
        request = pb.TokenizeRequest(text="a b" * 10_000)
        calls = [gateway.stub.Tokenize(request, timeout=15) for _ in range(6)]
        try:
            await until(lambda: gateway.num_running == 6)
            assert (await gateway.ask(pb.GenerateRequest(text="hi"), timeout_s=5)).ids == [5, 6, 7]
            assert not any(call.done() for call in calls)
        finally:
            released.set()
        assert len({tuple((await call).ids) for call in calls}) == 1
