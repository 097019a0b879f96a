"""Answers in OpenAI's shapes: what the streams say adds up to what the whole answers say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion as OpenAiCompletion
from openai.types.chat import ChatCompletion as OpenAiChat
from openai.types.chat import ChatCompletionChunk as OpenAiChatChunk
from pydantic import BaseModel, TypeAdapter

from gateway.answer import Answer
from gateway.answer_stream import ChoiceStreams
from gateway.http.answer_schema import ChatCompletion, ChatCompletionChunk, Completion, ModelList
from gateway.http.models import model_list
from gateway.http.to_answer import About, ChatAnswer, CompletionAnswer, HttpAnswer
from gateway.http.to_request import parse_chat, parse_completion
from gateway.tokenizer import ModelTokenizer
from outrider.params import StoppingParams
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2

KINDS = ("chat", "text")
TEXT = "The quick fox 안녕 \U0001f468 jumps"
LEAST = -9999.0
OURS: dict[tuple[str, str], TypeAdapter[Any]] = {
    ("chat", "whole"): TypeAdapter(ChatCompletion),
    ("chat", "event"): TypeAdapter(ChatCompletionChunk),
    ("text", "whole"): TypeAdapter(Completion),
    ("text", "event"): TypeAdapter(Completion),
}
THEIRS: dict[tuple[str, str], type[BaseModel]] = {
    ("chat", "whole"): OpenAiChat,
    ("chat", "event"): OpenAiChatChunk,
    ("text", "whole"): OpenAiCompletion,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(tiny_folder)


def answer_to(kind: str, tokenizer: ModelTokenizer, **fields: Any) -> HttpAnswer:
    """The answer to a short request of one of the two kinds."""
    about = About(request_id="r-1", model="tiny", tokenizer=tokenizer, created=1_700_000_000)
    if kind == "text":
        body = {"model": "tiny", "prompt": "Hi"} | fields
        return CompletionAnswer(parse_completion(json.dumps(body).encode()), about)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return ChatAnswer(parse_chat(json.dumps(body).encode()), about)


def whole_of(answer: HttpAnswer, responses: Iterable[pb.GenerateResponse]) -> bytes:
    """The body that these messages make."""
    for response in responses:
        answer.take(response)
    return answer.whole()


def with_logprobs(kind: str, number: int) -> dict[str, Any]:
    """The fields that ask for them."""
    return {"logprobs": True, "top_logprobs": number} if kind == "chat" else {"logprobs": number}


def token(token_id: int, *top: tuple[int, float]) -> sampling_pb2.GeneratedToken:
    """With a log-probability of -0.5."""
    return sampling_pb2.GeneratedToken(
        id=token_id,
        logprob=-0.5,
        top=[sampling_pb2.TopLogprob(id=each, logprob=logprob) for each, logprob in top],
    )


def piece(
    text: str, tokens: Sequence[sampling_pb2.GeneratedToken] = (), index: int = 0
) -> pb.GenerateResponse:
    """A message with text, tokens or both."""
    return pb.GenerateResponse(chunk=pb.GenerateChunk(index=index, text=text, tokens=tokens))


def finish(
    index: int = 0,
    reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_STOP,
    **usage: int,
) -> pb.GenerateResponse:
    """A choice's end, with the seed 2**64 - 1."""
    return pb.GenerateResponse(
        finish=pb.GenerateFinish(
            index=index, reason=reason, seed=2**64 - 1, usage=sampling_pb2.Usage(**usage)
        )
    )


def events(answer: HttpAnswer, responses: Sequence[pb.GenerateResponse]) -> list[dict[str, Any]]:
    """All events of a stream, checked to be one line each."""
    lines = [line for response in responses for line in answer.chunks(response)] + answer.final()
    assert not any(b"\n" in line or b"\r" in line for line in lines)
    return [json.loads(line) for line in lines]


def test_a_streamed_chat(tokenizer: ModelTokenizer) -> None:
    """Who speaks, the pieces, the end with the reason and the seed."""
    answer = answer_to("chat", tokenizer, stream=True)
    got = events(answer, [piece("a\n", [token(1)]), piece("", [token(2)]), piece("b"), finish()])
    head = {
        "id": "chatcmpl-r-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "tiny",
    }
    empty = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    assert got == [
        {**head, "choices": [{**empty, "delta": delta}]}
        for delta in (
            {"role": "assistant", "content": "", "refusal": None},
            {"content": "a\n"},
            {"content": "b"},
        )
    ] + [{**head, "choices": [{**empty, "finish_reason": "stop", "seed": 2**64 - 1}]}]


def test_a_streamed_text(tokenizer: ModelTokenizer) -> None:
    """The same object as the whole answer, a piece of the text at a time."""
    answer = answer_to("text", tokenizer, stream=True)
    length = sampling_pb2.FINISH_REASON_LENGTH
    got = events(answer, [piece("a", [token(1)]), piece("", [token(2)]), finish(reason=length)])
    head = {
        "id": "cmpl-r-1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
    }
    empty = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    assert got == [
        {**head, "choices": [{**empty, "text": "a"}]},
        {**head, "choices": [{**empty, "finish_reason": "length", "seed": 2**64 - 1}]},
    ]


def test_a_choice_without_text_begins_and_ends(tokenizer: ModelTokenizer) -> None:
    """An empty answer of a chat still says who speaks."""
    first, last = events(answer_to("chat", tokenizer, stream=True), [finish()])
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_usage_is_added_up(kind: str, tokenizer: ModelTokenizer) -> None:
    """Over all choices, drafts position by position; null in the events before, if asked for."""
    ends = [finish(0, prompt_tokens=5, completion_tokens=3, cached_prompt_tokens=4)]
    ends.append(finish(1, completion_tokens=2))
    for end, positions, unused in zip(
        ends, ([2, 1], [3]), ({"late": 1}, {"late": 2, "gap": 1}), strict=True
    ):
        stats = end.finish.speculation
        stats.rounds, stats.drafted, stats.accepted, stats.plain_steps = 4, 9, sum(positions), 1
        stats.accepted_per_position.extend(positions)
        stats.unused.update(unused)
    expected = {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "speculation": {
            "rounds": 8,
            "drafted": 18,
            "accepted": 6,
            "accepted_per_position": [5, 1],
            "unused": {"late": 3, "gap": 1},
            "plain_steps": 2,
        },
    }
    assert json.loads(whole_of(answer_to(kind, tokenizer, n=2), ends))["usage"] == expected
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *before, last = events(answer_to(kind, tokenizer, n=2, **asked), ends)
    assert all(event["usage"] is None for event in before)
    assert (last["choices"], last["usage"]) == ([], expected)
    assert not any("usage" in each for each in events(answer_to(kind, tokenizer, n=2), ends))


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_in_order(kind: str, tokenizer: ModelTokenizer) -> None:
    """Whichever ends first, and however their pieces come."""
    responses = [piece("b", index=1), piece("a"), finish(1), piece("a"), finish(0)]
    choices = json.loads(whole_of(answer_to(kind, tokenizer, n=2), responses))["choices"]
    texts = [each["message"]["content"] if kind == "chat" else each["text"] for each in choices]
    assert ([each["index"] for each in choices], texts) == ([0, 1], ["aa", "b"])


def test_bytes_of_tokens(tokenizer: ModelTokenizer) -> None:
    """They put together what was tokenized, whatever each token alone reads like."""
    ids = tokenizer.encode(TEXT)
    answer = answer_to("chat", tokenizer, **with_logprobs("chat", 0))
    body = json.loads(whole_of(answer, [piece(TEXT, [token(each) for each in ids]), finish()]))
    entries = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT
    halves = [entry for entry in entries if "\ufffd" in entry["token"]]
    assert halves
    for entry in entries:
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert (entry["logprob"], entry["top_logprobs"]) == (-0.5, [])


def test_special_tokens_are_spelled(tokenizer: ModelTokenizer) -> None:
    """One that ends a text has an entry like any other; an id without a token reads as nothing."""
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(500) == b""
    assert tokenizer.token_bytes(10**6) == b""


def test_what_cannot_be_has_a_number(tokenizer: ModelTokenizer) -> None:
    """JSON knows neither infinity nor NaN."""
    tokens = [token(5, (6, -math.inf), (7, math.nan), (8, -1e30), (9, -9998.0))]
    for kind in KINDS:
        answer = answer_to(kind, tokenizer, **with_logprobs(kind, 4))
        (line,) = answer.chunks(piece("x", tokens))[-1:]
        logprobs = json.loads(line, parse_constant=pytest.fail)["choices"][0]["logprobs"]
        if kind == "chat":
            top = [each["logprob"] for each in logprobs["content"][0]["top_logprobs"]]
        else:
            own, *top = logprobs["top_logprobs"][0].values()
            assert own == -0.5
        assert top == [LEAST, LEAST, LEAST, -9998.0]


def test_tokens_that_read_alike(tokenizer: ModelTokenizer) -> None:
    """Where texts are keys, the token's own log-probability stands, then the likeliest."""
    halves = [each for each in range(400) if tokenizer.token_bytes(each) in (b"\xf0", b"\x9f")]
    first, second = halves
    answer = answer_to("text", tokenizer, logprobs=2)
    body = whole_of(answer, [piece("", [token(first, (second, -0.1), (5, -3.0))]), finish()])
    top = json.loads(body)["choices"][0]["logprobs"]["top_logprobs"]
    assert top == [{"\ufffd": -0.5, tokenizer.token_bytes(5).decode(): -3.0}]


def test_offsets_of_tokens(tokenizer: ModelTokenizer) -> None:
    """Each token begins behind the characters that were whole before it; special ones take none."""
    ids = [*tokenizer.encode(TEXT), 2]
    answer = answer_to("text", tokenizer, logprobs=0)
    body = json.loads(whole_of(answer, [piece(TEXT, [token(each) for each in ids]), finish()]))
    logprobs = body["choices"][0]["logprobs"]
    seen = b""
    for token_id, offset in zip(ids, logprobs["text_offset"], strict=True):
        assert offset == len(seen.decode(errors="ignore"))
        seen += tokenizer.token_bytes(token_id)
    assert logprobs["text_offset"][-1] == len(TEXT)


@st.composite
def _chunks(draw: st.DrawFn) -> list[tuple[int, list[int], bool]]:
    """(choice, ids, last) of two choices, as a target may send them."""
    chunks = []
    open_choices = [0, 1]
    while open_choices:
        index = draw(st.sampled_from(open_choices))
        last = not draw(st.booleans())
        chunks.append((index, draw(st.lists(st.integers(3, 399), max_size=4)), last))
        if last:
            open_choices.remove(index)
    return chunks


@pytest.mark.parametrize("kind", KINDS)
@given(chunks=_chunks())
@settings(deadline=None, max_examples=50)
def test_a_stream_adds_up(
    kind: str, tokenizer: ModelTokenizer, chunks: list[tuple[int, list[int], bool]]
) -> None:
    """Its pieces, put together, are the whole answer: texts, one entry a token, reasons, usage."""
    answers = [Answer(tokenizer.detokenizer(), StoppingParams(stop=("e",)), []) for _ in range(2)]
    choices, responses, sent = ChoiceStreams(answers, 3, seed=9), [], [0, 0]
    for index, ids, last in chunks:
        chunk = target_pb2.TokenChunk(
            index=index, first_index=sent[index], tokens=[token(each, (each, -1)) for each in ids]
        )
        sent[index] += len(ids)
        if last:
            chunk.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
        responses += choices.push(chunk)
    asked = with_logprobs(kind, 1) | {"n": 2}
    whole = json.loads(whole_of(answer_to(kind, tokenizer, **asked), responses))
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = events(answer_to(kind, tokenizer, **asked), responses)
    assert stream[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [
            each
            for event in stream
            for each in event["choices"]
            if each["index"] == choice["index"]
        ]
        assert [each["finish_reason"] for each in pieces if each["finish_reason"]] == [
            choice["finish_reason"]
        ]
        logprobs = [each["logprobs"] for each in pieces if each["logprobs"]]
        if kind == "chat":
            text = "".join(each["delta"].get("content", "") for each in pieces)
            assert text == choice["message"]["content"]
            entries = [entry for each in logprobs for entry in each["content"]]
            assert entries == choice["logprobs"]["content"]
        else:
            assert "".join(each["text"] for each in pieces) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [value for each in logprobs for value in each[name]] == values
    check_shapes(kind, whole, stream)


def check_shapes(kind: str, whole: dict[str, Any], stream: list[dict[str, Any]]) -> None:
    """Our own types and those of OpenAI's client hold them."""
    OURS[kind, "whole"].validate_json(json.dumps(whole))
    THEIRS[kind, "whole"].model_validate(whole)
    for event in stream:
        OURS[kind, "event"].validate_json(json.dumps(event))
        if kind == "chat":  # the client has no type for events of texts: a reason is always there
            THEIRS[kind, "event"].model_validate(event)


def test_models() -> None:
    """As OpenAI lists them, with what a client should know before it asks."""
    models = pb.ListModelsResponse(models=[pb.Model(name="tiny", max_model_len=256, ready=True)])
    listed = model_list(models, 1_700_000_000)
    TypeAdapter(ModelList).validate_python(listed)
    assert listed == {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "outrider",
                "max_model_len": 256,
                "ready": True,
            }
        ],
    }
