"""Answers over HTTP, streamed or whole, as the same choices: checked for their shape on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_gateway import BODIES, CHAT, HttpAnswer, HttpClient, HttpGateway

DONE = "[DONE]"


@dataclass
class HttpChoice:
    """One text and how it ended."""

    text: str = ""
    deltas: list[str] = field(default_factory=list)
    """Of a stream only."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """(token, log-probability), if they were asked for."""
    reason: str | None = None
    seed: int | None = None

    @property
    def end(self) -> tuple[str, str | None, int | None, list[tuple[str, float]]]:
        """All that a stream and a whole answer have in common."""
        return self.text, self.reason, self.seed, self.scores


@dataclass
class HttpChoices:
    """All choices of one answer."""

    choices: list[HttpChoice]
    usage: dict[str, Any] | None
    """None for a stream that was not asked for it."""

    @property
    def only(self) -> HttpChoice:
        """The one choice."""
        (choice,) = self.choices
        return choice


async def ask_choices(
    http: HttpGateway | HttpClient,
    path: str,
    body: Mapping[str, Any],
    *,
    stream: bool,
    with_usage: bool = True,
) -> HttpChoices:
    """Ask for `body`, laid over a good request for this path. with_usage: of a stream."""
    asked = BODIES[path] | dict(body)
    if not stream:
        return whole_choices(path, await http.ask("POST", path, asked))
    asked |= {"stream": True, "stream_options": {"include_usage": with_usage}}
    return stream_choices(path, await http.ask("POST", path, asked), with_usage=with_usage)


def whole_choices(path: str, answer: HttpAnswer) -> HttpChoices:
    """Those of an answer in one piece, in the order of their indexes."""
    assert answer.status == 200, answer.body
    told = answer.json
    assert told["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert [each["index"] for each in told["choices"]] == list(range(len(told["choices"])))
    choices = []
    for each in told["choices"]:
        text = each["message"]["content"] if path == CHAT else each["text"]
        scores = _scores(path, each["logprobs"])
        choices.append(HttpChoice(text, [], scores, each["finish_reason"], each["seed"]))
    _check_ends(choices)
    return HttpChoices(choices, told["usage"])


def stream_choices(path: str, answer: HttpAnswer, *, with_usage: bool) -> HttpChoices:
    """Those of a stream: one finish for each and nothing of it behind that, then one event with
    the usage and no choices if it was asked for, then one mark of the end."""
    assert answer.status == 200, answer.body
    *events, done = answer.events
    assert done == DONE
    assert DONE not in events
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {event["object"] for event in events} == {kind}
    usage = None
    if with_usage:
        last = events.pop()
        assert last["choices"] == []
        usage = last["usage"]
        assert usage is not None
    assert all(event.get("usage", "none") == (None if with_usage else "none") for event in events)
    found: dict[int, HttpChoice] = {}
    for event in events:
        (piece,) = event["choices"]
        _add(path, found, piece)
    choices = [found[index] for index in range(len(found))]
    _check_ends(choices)
    return HttpChoices(choices, usage)


def _add(path: str, found: dict[int, HttpChoice], piece: dict[str, Any]) -> None:
    if path == CHAT and piece["index"] not in found:
        assert piece["delta"]["role"] == "assistant"
    choice = found.setdefault(piece["index"], HttpChoice())
    assert choice.reason is None, "a piece behind the end"
    text = piece["delta"].get("content", "") if path == CHAT else piece["text"]
    choice.text += text
    choice.deltas.append(text)
    choice.scores.extend(_scores(path, piece["logprobs"]))
    choice.reason = piece["finish_reason"]
    choice.seed = piece.get("seed")
    assert (choice.seed is None) is (choice.reason is None)


def _scores(path: str, logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    if logprobs is None:
        return []
    if path == CHAT:
        return [(each["token"], each["logprob"]) for each in logprobs["content"]]
    assert len({len(each) for each in logprobs.values()}) == 1
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def _check_ends(choices: list[HttpChoice]) -> None:
    for choice in choices:
        assert choice.reason in ("stop", "length")
        assert choice.seed is not None
