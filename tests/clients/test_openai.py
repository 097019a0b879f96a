"""The `openai` package against a real model: what it asks is understood, and it reads the answers.

The model is a tiny random one, so texts mean nothing; equal seeds must give equal texts all the
same, over every way to ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import Addresses

pytestmark = pytest.mark.timeout(120)  # the three services start within the first test

CHAT = {"messages": [{"role": "user", "content": "The quick brown fox"}]}
SETTINGS: dict[str, Any] = {"seed": 7, "max_tokens": 20, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(gateway: Addresses) -> Iterator[openai.OpenAI]:
    """One that sends a request once only."""
    with openai.OpenAI(base_url=gateway.http, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client: openai.OpenAI, gateway: Addresses) -> Any:
    """Asks for a chat completion."""

    def ask(**settings: Any) -> Any:
        asked = {"model": gateway.model, **CHAT, **SETTINGS, **settings}
        return client.chat.completions.create(**asked)

    return ask


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI, gateway: Addresses) -> Any:
    """Asks for a plain completion."""

    def ask(**settings: Any) -> Any:
        asked = {"model": gateway.model, "prompt": "The quick brown", **SETTINGS, **settings}
        return client.completions.create(**asked)

    return ask


def test_models(client: openai.OpenAI, gateway: Addresses) -> None:
    """The one model is listed, and can be asked for by its name; others cannot."""
    assert [model.id for model in client.models.list()] == [gateway.model]
    assert client.models.retrieve(gateway.model).id == gateway.model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert gateway.model in caught.value.message


def test_chat(chat: Any) -> None:
    """A whole answer, with its usage and what drafts did for it."""
    answer = chat()
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 20
    assert usage.total_tokens == usage.prompt_tokens + 20
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert usage.speculation["drafted"] >= usage.speculation["accepted"]


def test_a_stream_is_the_same_text(chat: Any) -> None:
    """The pieces add up to the whole answer of the same seed; the usage comes last, if asked."""
    whole = chat()
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert {chunk.id for chunk in (*chunks, last)} == {last.id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.choices for chunk in chat(stream=True))


def test_what_load_generators_ask_for(chat: Any) -> None:
    """A usage in every event: it is taken, and the usage is told at the end all the same."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(stream=True, stream_options=asked)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.usage.completion_tokens == 20


def test_completions(complete: Any) -> None:
    """The older API: whole and streamed, of a text and of token ids."""
    whole = complete()
    assert whole.object == "text_completion"
    assert whole.usage.completion_tokens == 20
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == (
        whole.choices[0].text
    )
    of_ids = complete(prompt=[3, 4, 5], max_tokens=5)
    assert (of_ids.usage.prompt_tokens, of_ids.usage.completion_tokens) == (3, 5)


def test_logprobs_of_a_chat(chat: Any) -> None:
    """One entry a token, whole and streamed alike, with the alternatives that were asked for."""
    asked = {"logprobs": True, "top_logprobs": 3}
    entries = chat(**asked).choices[0].logprobs.content
    assert len(entries) == 20
    for entry in entries:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert len(logprobs) == 3 and logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= max(logprobs) <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed = [
        entry
        for chunk in chat(stream=True, **asked)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [(e.bytes, e.logprob) for e in streamed] == [(e.bytes, e.logprob) for e in entries]
    assert chat().choices[0].logprobs is None


def test_logprobs_of_a_completion(complete: Any) -> None:
    """Four lists of one length, as that API has them."""
    logprobs = complete(logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 20
    assert len(logprobs.text_offset) == len(logprobs.top_logprobs) == 20
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_several_choices(chat: Any) -> None:
    """Each has its own seed, which gives its text again by itself; streams carry all of them."""
    choices = chat(n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert choices[0].seed == 7
    for choice in choices:
        alone = chat(seed=choice.seed).choices[0].message.content
        assert alone == choice.message.content
    texts = ["", "", ""]
    for chunk in chat(n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in choices]


def test_a_seed_that_nobody_chose_is_told(chat: Any) -> None:
    """It gives the text again."""
    first = chat(seed=openai.omit)
    again = chat(seed=first.choices[0].seed)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_stop(chat: Any) -> None:
    """The text ends before the stop string, or behind it if that is wanted."""
    text = chat(temperature=0).choices[0].message.content
    middle = len(text) // 2
    stop = next(c for c in text[middle:] if c.isascii() and c.isprintable())
    before = text[: text.index(stop)]
    answer = chat(temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == before
    kept = {"ignore_eos": True, "include_stop_str_in_output": True}
    assert chat(temperature=0, stop=stop, extra_body=kept).choices[0].message.content == (
        before + stop
    )


def test_settings_beside_openais(chat: Any) -> None:
    """`extra_body` reaches the model: top_k 1 is greedy, and so is a min_p of 1."""
    greedy = chat(temperature=0).choices[0].message.content
    for setting in ({"top_k": 1}, {"min_p": 1.0}):
        extra = {"ignore_eos": True, **setting}
        assert chat(temperature=1, extra_body=extra).choices[0].message.content == greedy
    repeated = {"ignore_eos": True, "repetition_penalty": 5.0}
    assert chat(temperature=0, extra_body=repeated).choices[0].message.content != greedy


def test_drafts_can_be_chosen(chat: Any) -> None:
    """Off, or exactly so many: the text is the same, and the usage tells what drafts did."""
    texts, drafted = set(), []
    for speculation in ({"mode": "off"}, {"mode": "fixed", "max_draft_tokens": 3}):
        answer = chat(extra_body={"ignore_eos": True, "speculation": speculation})
        texts.add(answer.choices[0].message.content)
        drafted.append(answer.usage.speculation["drafted"])
    assert len(texts) == 1
    assert drafted[0] == 0


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"top_q": 1}}, "top_q"),
        ({"extra_body": {"speculation": {"mode": "wild"}}}, "speculation.mode"),
    ],
)
def test_bad_requests_name_the_field(chat: Any, settings: dict[str, Any], param: str) -> None:
    """As BadRequestError, whose `param` is the JSON's own name."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**settings)
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_unknown_model(chat: Any) -> None:
    """As NotFoundError, which says what there is."""
    with pytest.raises(openai.NotFoundError) as caught:
        chat(model="gpt-4o")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
