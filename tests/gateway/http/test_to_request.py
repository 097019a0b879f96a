"""Fields of OpenAI's API at their place in the message that the core gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.http.to_request import ParsedRequest, parse_chat, parse_completion
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2

Parse = Callable[[bytes], ParsedRequest]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
BOTH = pytest.mark.parametrize(
    ("parse", "base"), [(parse_chat, CHAT), (parse_completion, COMPLETION)], ids=["chat", "text"]
)


def chat(**fields: Any) -> ParsedRequest:
    """A short chat with more fields."""
    return parse_chat(json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> ParsedRequest:
    """A short prompt with more fields."""
    return parse_completion(json.dumps(COMPLETION | fields).encode())


@BOTH
def test_every_field_at_its_place(parse: Parse, base: dict[str, Any]) -> None:
    """What the two APIs share becomes the request that a gRPC client would send."""
    fields = {
        "n": 3,
        "stop": ["a", "b"],
        "seed": 2**64 - 1,
        "logit_bias": {"5": -1, "0": 100},
        "max_tokens": 7,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.5,
        "temperature": 0.7,
        "top_p": 0.9,
        "user": "somebody",
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "include_stop_str_in_output": True,
        "priority": -5,
        "speculation": {"mode": "fixed", "max_draft_tokens": 4, "verification": "rejection"},
    }
    request = parse(json.dumps(base | fields).encode()).request
    request.ClearField("input")
    assert request == pb.GenerateRequest(
        model="m",
        sampling=sampling_pb2.SamplingParams(
            temperature=0.7,  # as a gRPC client's 0.7f
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            seed=2**64 - 1,
            repetition_penalty=1.1,
            frequency_penalty=-0.5,
            presence_penalty=0.5,
            logit_bias={5: -1, 0: 100},
        ),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=7,
            min_tokens=2,
            stop=["a", "b"],
            stop_token_ids=[3, 4],
            ignore_eos=True,
            include_stop=True,
        ),
        speculation=sampling_pb2.SpeculationParams(
            mode=sampling_pb2.SpeculationParams.MODE_FIXED,
            max_draft_tokens=4,
            verification=sampling_pb2.SpeculationParams.VERIFICATION_REJECTION,
        ),
        n=3,
        priority=-5,
    )


def test_the_least_chat() -> None:
    """What nobody set stays unset, so that the core's defaults hold; but there is a seed."""
    parsed = chat()
    assert 0 <= parsed.request.sampling.seed < 2**53
    assert parsed.request.sampling.HasField("seed")
    parsed.request.sampling.ClearField("seed")
    expected = pb.GenerateRequest(
        model="m",
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")]),
        sampling=sampling_pb2.SamplingParams(),
        stopping=sampling_pb2.StoppingParams(),
    )
    assert parsed == ParsedRequest(expected, stream=False, include_usage=False, logprobs=False)


def test_drawn_seeds_differ() -> None:
    """Two requests without a seed are not the same request."""
    assert chat().request.sampling.seed != chat().request.sampling.seed


def test_plain_texts_have_16_tokens() -> None:
    """OpenAI's default for completions; a chat goes on to the context's end."""
    assert completion().default_max_tokens == 16 and chat().default_max_tokens == 0
    assert not completion(max_tokens=None).request.stopping.HasField("max_tokens")
    assert completion(max_tokens=3).request.stopping.max_tokens == 3
    assert not chat().request.stopping.HasField("max_tokens")


def test_two_names_of_max_tokens() -> None:
    """Either counts, both if they agree; otherwise nobody knows which was meant."""
    assert chat(max_completion_tokens=5).request.stopping.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).request.stopping.max_tokens == 5
    with pytest.raises(InvalidRequest, match=r"must be equal to max_tokens \(4\)") as caught:
        chat(max_tokens=4, max_completion_tokens=5)
    assert caught.value.field == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("Hi", "Hi", []),
        (["Hi"], "Hi", []),
        ("", "", []),
        ([1, 2**32 - 1], "", [1, 2**32 - 1]),
        ([[1, 2]], "", [1, 2]),
    ],
)
def test_prompts(prompt: object, text: str, ids: list[int]) -> None:
    """A text or ids, also as the one element of a list."""
    request = completion(prompt=prompt).request
    assert (request.text, list(request.token_ids.ids)) == (text, ids)
    assert request.WhichOneof("input") == ("token_ids" if ids else "text")


def test_no_ids_are_a_prompt_of_ids() -> None:
    """The core says that it must not be empty, not that there is none."""
    assert completion(prompt=[]).request.WhichOneof("input") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        (["a", "b"], "prompt", "only one prompt a request is supported, got 2"),
        ([[1], [2]], "prompt", "only one prompt a request is supported, got 2"),
        ([1, "a"], "prompt[1]", "must be a token id"),
        ([True], "prompt[0]", "must be a token id"),
        ([1.0], "prompt[0]", "must be a token id"),
        ([1, -1], "prompt[1]", "must be at least 0 and at most 4294967295"),
        ([2**32], "prompt[0]", "must be at least 0 and at most 4294967295"),
        ([["a"]], "prompt[0]", "must be a token id"),
        ([[[1]]], "prompt[0]", "must be a token id"),
        (None, "prompt", "must be a string or a list of token ids"),
        ({}, "prompt", "must be a string or a list of token ids"),
    ],
)
def test_prompts_that_are_refused(prompt: object, field: str, message: str) -> None:
    """Several prompts are several requests; an id that is none is named by its place."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert (caught.value.field, caught.value.message) == (field, message)


def test_messages() -> None:
    """Roles and contents in order; `developer` is `system`, parts are put together as they are."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "system", "content": parts, "name": None},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "A", "refusal": None, "tool_calls": []},
    ]
    request = chat(messages=messages).request
    assert [(each.role, each.content) for each in request.chat.messages] == [
        ("system", "D"),
        ("system", "a b"),
        ("user", ""),
        ("assistant", "A"),
    ]


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        ({"role": "tool", "content": ""}, "role", "got 'tool'"),
        ({"role": "User", "content": ""}, "role", "got 'User'"),
        ({"content": ""}, "role", "must be set"),
        ({"role": "user"}, "content", "must be set"),
        ({"role": "user", "content": None}, "content", "must be a string or a list of text"),
        ({"role": "user", "content": []}, "content", "must not be empty"),
        ({"role": "user", "content": "", "name": "x"}, "name", "is not supported"),
        ({"role": "user", "content": "", "tool_calls": [1]}, "tool_calls", "is not supported"),
        ({"role": "user", "content": "", "x": 1}, "x", "is not a field that is known here"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "content[0].image_url",
            "is not supported",
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].type", "must be 'text'"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "must be set"),
        ({"role": "user", "content": ["x"]}, "content[0]", "must be an object"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type", "must be set"),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "content[0].text",
            "must be a string",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "x": 1}]},
            "content[0].x",
            "is not a field that is known here",
        ),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], field: str, says: str) -> None:
    """The place in the list and the field are named."""
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": "Hi"}, message])
    assert caught.value.field == f"messages[1].{field}"
    assert says in caught.value.message


def test_a_list_of_messages() -> None:
    """At least one, at most as many as the core takes, and the first bad one ends the search."""
    for messages, says in ([], "must not be empty"), (["x"] * 100_000, "must be an object"):
        with pytest.raises(InvalidRequest, match=says):
            chat(messages=messages)
    with pytest.raises(InvalidRequest, match="at most 4096 entries"):
        chat(messages=CHAT["messages"] * 4097)


def test_logprobs_of_chats() -> None:
    """Alternatives are asked for beside the token's own."""
    assert (chat().logprobs, chat().request.HasField("logprobs")) == (False, False)
    assert not chat(logprobs=False).request.HasField("logprobs")
    plain, more = chat(logprobs=True), chat(logprobs=True, top_logprobs=20)
    assert plain.logprobs and plain.request.HasField("logprobs") and plain.request.logprobs == 0
    assert more.logprobs and more.request.logprobs == 20
    for fields in ({"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}):
        with pytest.raises(InvalidRequest, match="top_logprobs: can only be set when logprobs"):
            chat(**fields)
    with pytest.raises(InvalidRequest, match="top_logprobs: must be at most 20, got 21"):
        chat(logprobs=True, top_logprobs=21)


def test_logprobs_of_plain_texts() -> None:
    """A number asks for them, 0 too."""
    assert not completion().logprobs
    for number in (0, 20):
        parsed = completion(logprobs=number)
        assert parsed.logprobs and parsed.request.HasField("logprobs")
        assert parsed.request.logprobs == number
    with pytest.raises(InvalidRequest, match="logprobs: must be an integer, got true"):
        completion(logprobs=True)


@BOTH
def test_streams(parse: Parse, base: dict[str, Any]) -> None:
    """The usage is a stream's own wish."""
    for options, wanted in ({}, False), ({"include_usage": True}, True), (None, False):
        body = base | {"stream": True, "stream_options": options}
        parsed = parse(json.dumps(body).encode())
        assert (parsed.stream, parsed.include_usage) == (True, wanted)
    with pytest.raises(InvalidRequest, match="stream_options: can only be set when stream"):
        parse(json.dumps(base | {"stream_options": {"include_usage": True}}).encode())
    with pytest.raises(InvalidRequest, match=r"stream_options.include_obfuscation: is not"):
        options = {"include_obfuscation": True}
        parse(json.dumps(base | {"stream": True, "stream_options": options}).encode())


def test_best_of() -> None:
    """Only as many as are told."""
    assert completion(best_of=1).request.n == 0
    assert completion(best_of=3, n=3).request.n == 3
    with pytest.raises(InvalidRequest, match=r"best_of: is not supported, except as n \(1\)"):
        completion(best_of=2)
    with pytest.raises(InvalidRequest, match=r"best_of: .* \(2\), got 3"):
        completion(best_of=3, n=2)


def test_one_stop_string() -> None:
    """It may stand alone."""
    assert list(chat(stop="END").request.stopping.stop) == ["END"]
    assert list(chat(stop=[]).request.stopping.stop) == []
