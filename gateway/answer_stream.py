"""A target's chunks to the client's messages, choice by choice.

Checks that no token is lost or doubled on the way, ends a choice at a stop string wherever the
target was by then, and keeps usage and draft statistics to what was delivered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gateway.answer import Answer
from outrider.serving.errors import EngineFailed
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2


class ChoiceStreams:
    """The messages of all choices of one request."""

    def __init__(self, answers: Sequence[Answer], num_prompt_tokens: int, seed: int) -> None:
        self._streams = [
            # The prompt is shared, so it counts once.
            AnswerStream(answer, num_prompt_tokens if index == 0 else 0, seed, index)
            for index, answer in enumerate(answers)
        ]

    @property
    def finished(self) -> bool:
        """Every choice has its finish message."""
        return all(stream.finished for stream in self._streams)

    @property
    def stopped_here(self) -> bool:
        """The target goes on with some choice: it does not know of the stop."""
        return any(stream.stopped_here for stream in self._streams)

    def push(self, chunk: target_pb2.TokenChunk) -> list[pb.GenerateResponse]:
        """The messages that follow from a chunk. Raises EngineFailed if it does not fit."""
        if chunk.index >= len(self._streams):
            raise EngineFailed(f"the target sent choice {chunk.index} of {len(self._streams)}")
        return self._streams[chunk.index].push(chunk)


class AnswerStream:
    """The messages of one choice."""

    def __init__(self, answer: Answer, num_prompt_tokens: int, seed: int, index: int = 0) -> None:
        """`seed` counts unless the target says that this choice has another one."""
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = seed
        self._num_cached_tokens = 0
        self._index = index
        self._drafts = DeliveredDrafts()
        self.finished = False
        """The finish message was made."""
        self.stopped_here = False
        """By a stop string, and the target does not know yet."""

    def push(self, chunk: target_pb2.TokenChunk) -> list[pb.GenerateResponse]:
        """The messages that follow from a chunk. Raises EngineFailed if it does not fit."""
        if self.stopped_here:
            self.stopped_here = not chunk.HasField("finish")
            return []  # made before the target could know
        if self.finished:
            raise EngineFailed(f"the target sent more of choice {self._index} behind its finish")
        if chunk.index != self._index or chunk.first_index != self._answer.num_tokens:
            raise EngineFailed(
                f"the target sent token {chunk.first_index} of choice {chunk.index} when token "
                f"{self._answer.num_tokens} of choice {self._index} was next"
            )
        if chunk.HasField("seed"):  # the first chunk
            self._seed = chunk.seed
            self._num_cached_tokens = chunk.cached_prompt_tokens
        pieces, stopped = self._pieces(chunk)
        responses = [pb.GenerateResponse(chunk=piece) for piece in pieces]
        if stopped or chunk.HasField("finish"):
            responses.append(self._finish(chunk, stopped))
        return responses

    def _pieces(self, chunk: target_pb2.TokenChunk) -> tuple[list[pb.GenerateChunk], bool]:
        """What is delivered, one message a run of tokens; whether a stop string was met."""
        pieces, stopped = [], False
        for run in _runs(chunk.tokens):
            piece = self._answer.push([token.id for token in run])
            tokens = run[: piece.num_tokens]
            self._drafts.add(tokens)
            pieces.append(pb.GenerateChunk(index=self._index, text=piece.text, tokens=tokens))
            if piece.stopped:
                stopped = True
                break
        if chunk.HasField("finish") and not stopped:
            tail = self._answer.finish()
            stopped = tail.stopped
            if tail.text:  # by itself: it may come from tokens of both origins
                pieces.append(pb.GenerateChunk(index=self._index, text=tail.text))
        if chunk.prompt_tokens:
            if not pieces:
                pieces.append(pb.GenerateChunk(index=self._index))
            pieces[0].prompt_tokens.extend(chunk.prompt_tokens)
        return pieces, stopped

    def _finish(self, chunk: target_pb2.TokenChunk, stopped: bool) -> pb.GenerateResponse:
        self.finished = True
        self.stopped_here = stopped and not chunk.HasField("finish")
        stats = chunk.finish.speculation if chunk.HasField("finish") else chunk.speculation
        if stopped:
            stats = self._drafts.up_to_here(stats)
        usage = sampling_pb2.Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._answer.num_tokens,
            cached_prompt_tokens=self._num_cached_tokens,
        )
        finish = pb.GenerateFinish(
            index=self._index,
            reason=sampling_pb2.FINISH_REASON_STOP if stopped else chunk.finish.reason,
            usage=usage,
            seed=self._seed,
            speculation=stats,
        )
        return pb.GenerateResponse(finish=finish)


def _runs(
    tokens: Sequence[sampling_pb2.GeneratedToken],
) -> Iterator[list[sampling_pb2.GeneratedToken]]:
    """Neighbours of one origin: accepted drafts, or the target's own."""
    for _, run in itertools.groupby(tokens, key=lambda token: token.drafted):
        yield list(run)


class DeliveredDrafts:
    """Counts the accepted drafts among delivered tokens, by their position in their round.

    A round gives its accepted drafts and then a token of the target's own.
    """

    def __init__(self) -> None:
        self._accepted_per_position: list[int] = []
        self._position = 0

    def add(self, tokens: Sequence[sampling_pb2.GeneratedToken]) -> None:
        """The next tokens of the answer."""
        for token in tokens:
            if not token.drafted:
                self._position = 0
                continue
            if self._position == len(self._accepted_per_position):
                self._accepted_per_position.append(0)
            self._accepted_per_position[self._position] += 1
            self._position += 1

    def up_to_here(self, stats: sampling_pb2.SpeculationStats) -> sampling_pb2.SpeculationStats:
        """The target's statistics, which may run ahead, cut to what was delivered.

        Drafts that were accepted behind the stop become unused. Drafts that were rejected behind it
        cannot be told from earlier ones and stay.
        """
        cut = sampling_pb2.SpeculationStats()
        cut.CopyFrom(stats)
        accepted = sum(self._accepted_per_position)
        num_behind = max(0, stats.accepted - accepted)
        cut.accepted = accepted
        cut.drafted = max(accepted, stats.drafted - num_behind)
        cut.accepted_per_position[:] = self._accepted_per_position
        if num_behind:
            cut.unused["finished"] += num_behind
        return cut
