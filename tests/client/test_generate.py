"""What a program asks through the client, and what it gets back, with a real gateway in between."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from outrider.client import (
    Answer,
    Choice,
    Client,
    ClientTls,
    Finish,
    InvalidRequest,
    NotFound,
    Retries,
    Unavailable,
)
from protos.outrider.v1 import sampling_pb2
from tests.support.certificates import Authority
from tests.support.gateways import MAX_MODEL_LEN, VOCAB_SIZE, gateway_on, gateway_with
from tests.support.played_gateway import chunk, finish, played_gateway
from tests.support.scripted_gateway import scripted_gateway
from tests.support.scripted_target import Script

IDS = [70, 71, 72, 73, 74, 75]


async def test_a_whole_answer(tiny_folder: Path) -> None:
    """Text, ids, reason, usage, seed and what drafts did are those of the gateway."""
    async with (
        gateway_with(tiny_folder, Script(IDS, block=3)) as (gateway, target),
        Client(gateway.address) as client,
    ):
        answer = await client.generate("fox", temperature=0.5, seed=2**64 - 1, max_tokens=5)
        assert answer.text == await client.detokenize(answer.choices[0].token_ids)
        prompt = await client.tokenize("fox")
    [choice] = answer.choices
    assert choice.token_ids == tuple(IDS[:5])
    assert [token.drafted for token in choice.tokens] == [True, True, False, True, False]
    end = choice.finish
    assert (end.reason, end.seed) == ("length", 2**64 - 1)
    assert (end.prompt_tokens, end.completion_tokens) == (len(prompt.ids), 5)
    assert (end.rounds, end.drafted, end.accepted) == (2, 3, 3)
    assert end.accepted_per_position == (2, 1)


async def test_every_setting_travels_under_its_name(tiny_folder: Path) -> None:
    """What was given reaches the target; the gateway's defaults stand for the rest."""
    async with (
        gateway_with(tiny_folder, Script(IDS)) as (gateway, target),
        Client(gateway.address) as client,
    ):
        await client.generate(
            token_ids=[3, 4],
            request_id="mine",
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            seed=9,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={7: 1.5},
            max_tokens=4,
            min_tokens=2,
            stop="never",
            stop_token_ids=[400],
            ignore_eos=True,
            include_stop=True,
            speculation="fixed",
            max_draft_tokens=2,
            verification="rejection",
            logprobs=2,
            prompt_logprobs=None,
            priority=-5,
        )
        await client.generate("x")
    given, default = target.seen.requests
    assert (given.request_id, list(given.token_ids), given.priority) == ("mine", [3, 4], -5)
    assert given.sampling == sampling_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=9,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={7: 1.5},
    )
    assert given.stopping.max_tokens == 4 and given.stopping.min_tokens == 2
    assert list(given.stopping.stop_token_ids) == [400] and given.stopping.ignore_eos
    assert given.speculation == sampling_pb2.SpeculationParams(
        mode="MODE_FIXED", max_draft_tokens=2, verification="VERIFICATION_REJECTION"
    )
    assert given.logprobs == 2 and not given.HasField("prompt_logprobs")
    assert default.sampling.temperature == 1 and default.sampling.seed != 0


async def test_pieces(tiny_folder: Path) -> None:
    """They add up to the answer; the last one of a choice has its end and no text."""
    async with (
        gateway_with(tiny_folder, Script(IDS, block=2)) as (gateway, _),
        Client(gateway.address) as client,
    ):
        messages = [{"role": "user", "content": "hi"}]
        pieces = [piece async for piece in client.stream(messages=messages, seed=1)]
        answer = await client.generate(messages=messages, seed=1)
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [token.id for piece in pieces for token in piece.tokens] == IDS
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].text == "" and pieces[-1].finish == answer.choices[0].finish


async def test_choices_side_by_side() -> None:
    """Each has its own text and end, in the order of its index, whatever came first."""
    play = [chunk("a", 1), chunk("b", 0), chunk("c", 1), finish(1), chunk("d", 0), finish(0)]
    async with played_gateway(play) as gateway, Client(gateway.address) as client:
        answer = await client.generate("x", n=2)
    assert [choice.text for choice in answer.choices] == ["bd", "ac"]
    assert [choice.finish.index for choice in answer.choices] == [0, 1]
    assert answer.text == "bd"


async def test_log_probabilities() -> None:
    """Those of the answer stand with its tokens, those of the prompt with the answer."""
    with scripted_gateway() as gateway:
        async with Client(gateway.address) as client:
            answer = await client.generate("x", logprobs=1, prompt_logprobs=1)
    [choice] = answer.choices
    assert [token.logprob for token in choice.tokens] == [-0.25, -0.5]
    assert choice.tokens[0].top == ((8, -0.125),)
    assert [(token.id, token.logprob) for token in answer.prompt_tokens] == [(3, None), (4, -2.0)]
    assert answer.prompt_tokens[1].top == ((9, -1.0),)


async def test_tokens_text_and_models(tiny_folder: Path) -> None:
    """The calls beside text generation."""
    async with (
        gateway_with(tiny_folder, Script(IDS)) as (gateway, _),
        Client(gateway.address) as client,
    ):
        [model] = await client.models()
        assert (model.name, model.ready) == (tiny_folder.name, True)
        assert (model.max_model_len, model.vocab_size) == (MAX_MODEL_LEN, VOCAB_SIZE)
        tokens = await client.tokenize("The quick fox", model=model.name)
        assert len(tokens.ids) == len(tokens.spelled) > 1
        assert tokens.max_model_len == MAX_MODEL_LEN
        assert await client.detokenize(tokens.ids) == "The quick fox"
        chat = await client.tokenize(messages=[{"role": "user", "content": "hi"}])
        assert "<|im_start|>" in await client.detokenize(chat.ids, keep_special=True)
        assert "<|im_start|>" not in await client.detokenize(chat.ids)


async def test_refusals_are_typed(tiny_folder: Path) -> None:
    """A program reads the field, and tells a wrong request from a gateway that cannot serve."""
    async with (
        gateway_on(tiny_folder, ["127.0.0.1:1"]) as gateway,
        Client(gateway.address) as client,
    ):
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", top_p=3.0)
        assert caught.value.field == "sampling.top_p" and "at most 1" in caught.value.message
        with pytest.raises(NotFound, match="nobody"):
            await client.generate("x", model="nobody")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await client.generate("x", timeout_s=0.5)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"temperature": "warm"}, "sampling.temperature"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"stop": [3]}, "stopping.stop"),
        ({"speculation": "sometimes"}, "speculation.mode"),
        ({"model": "\ud800"}, "model"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_by_its_field(
    settings: dict[str, object], field: str
) -> None:
    """Before anything is sent."""
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", **settings)
    assert caught.value.field == field


async def test_wrong_use_is_told_as_such() -> None:
    """No input, two inputs, a setting that there is not, a client that is not open."""
    client = Client("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="async with"):
        await client.generate("x")
    async with client:
        with pytest.raises(TypeError, match="exactly one input.*none"):
            await client.generate()
        with pytest.raises(TypeError, match="prompt and token_ids"):
            await client.generate("x", token_ids=[1])
        with pytest.raises(TypeError, match="tempurature"):
            await client.generate("x", tempurature=1)
    for address, key in (("nowhere", None), ("127.0.0.1:1", "schlüssel"), ("127.0.0.1:1", "")):
        with pytest.raises(ValueError, match="host:port|api_key"):
            Client(address, api_key=key)


async def test_a_key_travels_with_every_call() -> None:
    """As a bearer token, on all methods; without one there is no header."""
    async with played_gateway([chunk("a"), finish()]) as gateway:
        async with Client(gateway.address, api_key="s3cret") as client:
            await client.generate("x")
            await client.models()
        async with Client(gateway.address) as client:
            await client.generate("x")
    keys = [metadata.get("authorization") for metadata in gateway.metadata]
    assert keys == ["Bearer s3cret", "Bearer s3cret", None]


async def test_an_answer_without_its_end_is_no_answer() -> None:
    """A stream that just ends, as behind a broken proxy, is told as such."""
    async with played_gateway([chunk("half")]) as gateway, Client(gateway.address) as client:
        with pytest.raises(Unavailable, match="before its end"):
            await client.generate("x")


def test_no_protobuf_in_what_a_program_holds() -> None:
    """Values are plain, so that they can be compared, kept and printed."""
    end = Finish(0, "stop", 1, 1, 7, 0, 0, 0)
    answer = Answer((Choice("a", (), end),))
    assert asdict(answer)["choices"][0]["finish"]["seed"] == 7
    assert {field.name for field in fields(end)} >= {"reason", "seed", "accepted"}


async def test_tls(tiny_folder: Path, tmp_path: Path) -> None:
    """A gateway that the given authority has signed is asked, another one is not there."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair = ours.issue("gateway")
    tls = ClientTls(ours.ca)
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with gateway_with(tiny_folder, Script(IDS), tls=tls, **settings) as (gateway, _):
        async with Client(gateway.address, tls=tls) as client:
            assert (await client.generate("x")).choices[0].token_ids == tuple(IDS)
        once = Retries(attempts=1)
        async with Client(gateway.address, tls=ClientTls(theirs.ca), retries=once) as client:
            with pytest.raises(Unavailable, match="(?i)certificate"):
                await client.generate("x")
