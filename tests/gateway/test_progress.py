"""What the next target is asked for, and how its chunks become a continuation."""

from __future__ import annotations

import pytest

from gateway.progress import Progress
from protos.outrider.v1 import sampling_pb2, target_pb2

REQUEST = target_pb2.TokenRequest(
    token_ids=[1, 2, 3], stopping=sampling_pb2.StoppingParams(max_tokens=8), prompt_logprobs=1
)


def chunk(*ids: int, prompt: int = 0, index: int = 0, **more: object) -> target_pb2.TokenChunk:
    """Some tokens of a choice, behind some of the prompt."""
    return target_pb2.TokenChunk(
        index=index,
        tokens=[sampling_pb2.GeneratedToken(id=each) for each in ids],
        prompt_tokens=[sampling_pb2.PromptToken(id=each) for each in range(prompt)],
        **more,
    )


def test_before_anything_came_the_request_is_the_same() -> None:
    """Nothing was delivered: any target may start from the beginning."""
    progress = Progress(1)
    assert not progress.started and progress.can_resume(REQUEST)
    assert progress.rest_of(REQUEST) == REQUEST


def test_the_rest_of_a_request() -> None:
    """Delivered tokens are resumed ones, and the prompt's log-probabilities are not asked again."""
    progress = Progress(1)
    progress.take(chunk(5, prompt=3))
    progress.take(chunk(6, 7))
    rest = progress.rest_of(REQUEST)
    assert list(rest.resumed_token_ids) == [5, 6, 7]
    assert not rest.HasField("prompt_logprobs")
    assert rest.stopping == REQUEST.stopping
    assert not REQUEST.resumed_token_ids
    progress.take(chunk(8))
    assert list(progress.rest_of(REQUEST).resumed_token_ids) == [5, 6, 7, 8]


def test_prompt_tokens_are_delivered_once() -> None:
    """Lost between two parts of the prompt: the next target's first ones are left out."""
    progress = Progress(2)
    assert len(progress.take(chunk(prompt=3)).prompt_tokens) == 3
    assert progress.started and progress.can_resume(REQUEST)
    assert progress.rest_of(REQUEST) == REQUEST
    assert len(progress.take(chunk(prompt=2)).prompt_tokens) == 0
    assert [each.id for each in progress.take(chunk(5, prompt=2)).prompt_tokens] == [1]


def test_draft_counts_add_up() -> None:
    """Counts of both targets together, in chunks and in the finish, over two moves."""
    progress = Progress(1)
    for _ in range(3):
        progress.rest_of(REQUEST)
        stats = sampling_pb2.SpeculationStats(
            rounds=2, drafted=5, accepted=3, accepted_per_position=[2, 1], plain_steps=1
        )
        stats.unused["late"] = 4
        last = progress.take(chunk(5, 6, speculation=stats))
    assert (last.speculation.rounds, last.speculation.plain_steps) == (6, 3)
    assert list(last.speculation.accepted_per_position) == [6, 3]
    progress.rest_of(REQUEST)
    stats = sampling_pb2.SpeculationStats(plain_steps=1)
    finish = target_pb2.TokenFinish(speculation=stats)
    end = progress.take(chunk(7, speculation=stats, finish=finish))
    assert progress.finished
    assert (end.finish.speculation.drafted, end.finish.speculation.accepted) == (15, 9)
    assert list(end.finish.speculation.accepted_per_position) == [6, 3]
    assert end.finish.speculation.unused["late"] == 12
    assert end.finish.speculation.plain_steps == 4


@pytest.mark.parametrize(
    "chunks",
    [[chunk(*range(8))], [chunk(5), chunk(index=1, finish=target_pb2.TokenFinish())]],
    ids=["nothing is left", "two choices"],
)
def test_what_cannot_be_resumed(chunks: list[target_pb2.TokenChunk]) -> None:
    """All allowed tokens were delivered without a finish; or several choices have begun."""
    progress = Progress(len({each.index for each in chunks}))
    for each in chunks:
        progress.take(each)
    assert not progress.can_resume(REQUEST)
