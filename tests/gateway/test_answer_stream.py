"""A target's chunks to the client's messages: what a stop string does to usage and statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.answer import Answer
from gateway.answer_stream import AnswerStream
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
    assert len(stream.push(chunk(tokenizer, "abcd", "tddt", 0, first))) == 1
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


def test_the_targets_own_finish_keeps_its_statistics(tokenizer: ModelTokenizer) -> None:
    """Without a stop string nothing is recounted."""
    stream = stream_for(tokenizer)
    stats = Stats(rounds=4, drafted=9, accepted=2, accepted_per_position=[2], unused={"gap": 1})
    last = chunk(tokenizer, "ab", "dt", 0, stats)
    last.finish.reason = sampling_pb2.FINISH_REASON_LENGTH
    last.finish.speculation.CopyFrom(stats)
    last.finish.usage.cached_prompt_tokens = 2
    _, finish = stream.push(last)
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
