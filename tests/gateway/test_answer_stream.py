"""A target's chunks to the client's messages: what a stop string does to usage and statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.answer import Answer
from gateway.answer_stream import AnswerStream, ChoiceStreams
from gateway.tokenizer import ModelTokenizer
from outrider.params import StoppingParams
from outrider.serving.errors import EngineFailed
from protos.outrider.v1 import sampling_pb2, target_pb2

Stats = sampling_pb2.SpeculationStats


@pytest.fixture
def tokenizer(tiny_folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(tiny_folder)


def stream_for(tokenizer: ModelTokenizer, *stops: str) -> AnswerStream:
    """A fresh choice behind a prompt of 3 tokens."""
    answer = Answer(tokenizer.detokenizer(), StoppingParams(stop=stops), [])
    return AnswerStream(answer, 3, seed=9)


def chunk(
    tokenizer: ModelTokenizer, text: str, marks: str, first_index: int, stats: Stats
) -> target_pb2.TokenChunk:
    """One character a token; `d` marks a draft that was accepted, `t` the target's own token."""
    ids = [tokenizer.encode(char)[0] for char in text]
    tokens = [
        sampling_pb2.GeneratedToken(id=token_id, drafted=mark == "d")
        for token_id, mark in zip(ids, marks, strict=True)
    ]
    return target_pb2.TokenChunk(first_index=first_index, tokens=tokens, speculation=stats)


def test_statistics_end_with_the_stop(tokenizer: ModelTokenizer) -> None:
    """Drafts accepted behind the stop, and in rounds that ran ahead of the stream, are unused."""
    stream = stream_for(tokenizer, "yz")
    first = Stats(rounds=1, drafted=3, accepted=2, accepted_per_position=[1, 1], plain_steps=1)
    stream.push(chunk(tokenizer, "abcd", "tddt", 0, first))
    ahead = Stats(
        rounds=3,
        drafted=10,
        accepted=8,
        accepted_per_position=[3, 3, 2],
        plain_steps=1,
        unused={"late": 2},
    )
    delivered, finish = stream.push(chunk(tokenizer, "xyzw", "dddt", 4, ahead))
    assert (delivered.chunk.text, len(delivered.chunk.tokens)) == ("x", 3)
    stats = finish.finish.speculation
    assert (stats.accepted, list(stats.accepted_per_position)) == (5, [2, 2, 1])
    assert stats.drafted == 7
    assert dict(stats.unused) == {"late": 2, "finished": 3}
    assert finish.finish.usage.completion_tokens == 7
    assert finish.finish.usage.prompt_tokens == 3
    assert stream.finished and stream.stopped_here


def test_a_message_holds_tokens_of_one_origin(tokenizer: ModelTokenizer) -> None:
    """Its text is that of accepted drafts or of the target's own tokens, so it can be coloured."""
    stream = stream_for(tokenizer, "de")
    last = chunk(tokenizer, "abcdXY", "tddtdd", 0, Stats())
    last.prompt_tokens.add(id=7)
    last.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
    *messages, finish = stream.push(last)
    assert [
        (each.chunk.text, [token.drafted for token in each.chunk.tokens]) for each in messages
    ] == [("a", [False]), ("bc", [True] * 2), ("", [False]), ("dXY", [True] * 2)]
    assert [len(each.chunk.prompt_tokens) for each in messages] == [1, 0, 0, 0]
    assert finish.finish.usage.completion_tokens == 6


def test_a_stop_string_ends_in_any_run(tokenizer: ModelTokenizer) -> None:
    """Runs behind the one that completes it are not delivered, and not counted."""
    stream = stream_for(tokenizer, "bc")
    stats = Stats(rounds=2, drafted=4, accepted=4, accepted_per_position=[2, 2], plain_steps=1)
    *messages, finish = stream.push(chunk(tokenizer, "abcdXYt", "tddtddt", 0, stats))
    assert [(each.chunk.text, len(each.chunk.tokens)) for each in messages] == [("a", 1), ("", 2)]
    assert finish.finish.usage.completion_tokens == 3
    assert finish.finish.speculation.accepted == 2
    assert dict(finish.finish.speculation.unused) == {"finished": 2}


def test_the_targets_own_finish_keeps_its_statistics(tokenizer: ModelTokenizer) -> None:
    """Without a stop string nothing is recounted."""
    stream = stream_for(tokenizer)
    stats = Stats(rounds=4, drafted=9, accepted=2, accepted_per_position=[2], unused={"gap": 1})
    last = chunk(tokenizer, "ab", "dt", 0, stats)
    last.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
    last.finish.speculation.CopyFrom(stats)
    last.seed, last.cached_prompt_tokens = 7, 2
    finish = stream.push(last)[-1]
    assert finish.finish.speculation == stats
    assert finish.finish.usage.cached_prompt_tokens == 2
    assert stream.finished and not stream.stopped_here


def test_held_text_comes_with_the_finish(tokenizer: ModelTokenizer) -> None:
    """A finish without tokens still brings the text that waited for a stop string."""
    stream = stream_for(tokenizer, "abX")
    (held,) = stream.push(chunk(tokenizer, "ab", "tt", 0, Stats()))
    assert (held.chunk.text, len(held.chunk.tokens)) == ("", 2)
    last = target_pb2.TokenChunk(first_index=2)
    last.finish.reason = sampling_pb2.FINISH_REASON_STOP
    rest, _ = stream.push(last)
    assert (rest.chunk.text, len(rest.chunk.tokens)) == ("ab", 0)


@pytest.mark.parametrize(("index", "first_index"), [(0, 1), (0, 3), (1, 2)])
def test_tokens_must_follow_each_other(
    tokenizer: ModelTokenizer, index: int, first_index: int
) -> None:
    """A repeated, missing or foreign token is an error, not a wrong text."""
    stream = stream_for(tokenizer)
    stream.push(chunk(tokenizer, "ab", "tt", 0, Stats()))
    wrong = chunk(tokenizer, "c", "t", first_index, Stats())
    wrong.index = index
    with pytest.raises(EngineFailed, match="token 2 of choice 0 was next"):
        stream.push(wrong)


def choices_for(tokenizer: ModelTokenizer, count: int, *stops: str) -> ChoiceStreams:
    """Fresh choices behind a prompt of 3 tokens."""
    stopping = StoppingParams(stop=stops)
    answers = [Answer(tokenizer.detokenizer(), stopping, []) for _ in range(count)]
    return ChoiceStreams(answers, 3, seed=9)


def chunk_of(
    tokenizer: ModelTokenizer, index: int, text: str, first_index: int, *, last: bool = False
) -> target_pb2.TokenChunk:
    """Plain tokens of one choice; the seed of choice i is 100 + i, told with its first token."""
    message = chunk(tokenizer, text, "t" * len(text), first_index, Stats())
    message.index = index
    if first_index == 0:
        message.seed = 100 + index
    if last:
        message.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
    return message


def test_choices_are_told_apart(tokenizer: ModelTokenizer) -> None:
    """Interleaved chunks become messages with their index; seed and usage are each one's own."""
    choices = choices_for(tokenizer, 2)
    (first,) = choices.push(chunk_of(tokenizer, 1, "xy", 0))
    (second,) = choices.push(chunk_of(tokenizer, 0, "ab", 0))
    assert [(m.chunk.index, m.chunk.text) for m in (first, second)] == [(1, "xy"), (0, "ab")]
    _, end = choices.push(chunk_of(tokenizer, 0, "c", 2, last=True))
    assert not choices.finished
    _, other_end = choices.push(chunk_of(tokenizer, 1, "z", 2, last=True))
    assert choices.finished and not choices.stopped_here
    for message, index, prompt_tokens in ((end, 0, 3), (other_end, 1, 0)):
        finish = message.finish
        assert (finish.index, finish.seed) == (index, 100 + index)
        assert finish.usage.prompt_tokens == prompt_tokens
        assert finish.usage.completion_tokens == 3


def test_a_choice_that_was_stopped_here_is_deaf(tokenizer: ModelTokenizer) -> None:
    """What the target still makes of it goes nowhere, and the others go on."""
    choices = choices_for(tokenizer, 2, "b")
    assert len(choices.push(chunk_of(tokenizer, 0, "ab", 0))) == 2
    assert choices.push(chunk_of(tokenizer, 0, "cd", 2)) == []
    assert choices.push(chunk_of(tokenizer, 1, "xy", 0))[0].chunk.text == "xy"
    assert choices.stopped_here and not choices.finished
    assert choices.push(chunk_of(tokenizer, 0, "e", 4, last=True)) == []
    choices.push(chunk_of(tokenizer, 1, "z", 2, last=True))
    assert choices.finished and not choices.stopped_here


def test_a_choice_that_nobody_asked_for_is_an_error(tokenizer: ModelTokenizer) -> None:
    """Its tokens belong to nobody."""
    with pytest.raises(EngineFailed, match="choice 2 of 2"):
        choices_for(tokenizer, 2).push(chunk_of(tokenizer, 2, "a", 0))


def test_nothing_comes_behind_a_finish(tokenizer: ModelTokenizer) -> None:
    """A target that goes on is broken: the client has the end already, and gets nothing more."""
    stream = stream_for(tokenizer)
    last = chunk(tokenizer, "ab", "tt", 0, Stats())
    last.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
    stream.push(last)
    with pytest.raises(EngineFailed, match="behind its finish"):
        stream.push(chunk(tokenizer, "c", "t", 2, Stats()))
