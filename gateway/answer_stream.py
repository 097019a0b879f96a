"""A target's chunks to the client's messages, for one choice.

Checks that no token is lost or doubled on the way, ends the choice at a stop string wherever the
target was by then, and keeps usage and draft statistics to what was delivered.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.answer import Answer
from outrider.serving.errors import EngineFailed
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2


class AnswerStream:
    """The messages of one choice."""

    def __init__(self, answer: Answer, num_prompt_tokens: int, seed: int) -> None:
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = seed
        self.finished = False
        """The finish message was made."""
        self.stopped_here = False
        """By a stop string: the target does not know yet."""

    def push(self, chunk: target_pb2.TokenChunk) -> list[pb.GenerateResponse]:
        """The messages that follow from a chunk. Raises EngineFailed if it does not fit."""
        if chunk.index != 0 or chunk.first_index != self._answer.num_tokens:
            raise EngineFailed(
                f"the target sent token {chunk.first_index} of choice {chunk.index} when token "
                f"{self._answer.num_tokens} of choice 0 was next"
            )
        piece = self._answer.push([token.id for token in chunk.tokens])
        text, stopped = piece.text, piece.stopped
        if chunk.HasField("finish") and not stopped:
            tail = self._answer.finish()
            text, stopped = text + tail.text, tail.stopped
        responses = []
        tokens = chunk.tokens[: piece.num_tokens]
        if tokens or text:
            responses.append(pb.GenerateResponse(chunk=pb.GenerateChunk(text=text, tokens=tokens)))
        if stopped or chunk.HasField("finish"):
            responses.append(self._finish(chunk, stopped, piece.num_tokens))
        return responses

    def _finish(
        self, chunk: target_pb2.TokenChunk, stopped: bool, num_taken: int
    ) -> pb.GenerateResponse:
        self.finished = True
        self.stopped_here = stopped and not chunk.HasField("finish")
        stats = chunk.finish.speculation if chunk.HasField("finish") else chunk.speculation
        usage = sampling_pb2.Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._answer.num_tokens,
            cached_prompt_tokens=chunk.finish.usage.cached_prompt_tokens,
        )
        finish = pb.GenerateFinish(
            reason=sampling_pb2.FINISH_REASON_STOP if stopped else chunk.finish.reason,
            usage=usage,
            seed=self._seed,
            speculation=without_tail(stats, [token.drafted for token in chunk.tokens], num_taken),
        )
        return pb.GenerateResponse(finish=finish)


def without_tail(
    stats: sampling_pb2.SpeculationStats, drafted: Sequence[bool], num_taken: int
) -> sampling_pb2.SpeculationStats:
    """Statistics up to a stop string: accepted drafts behind it become unused.

    `drafted` are the marks of the last chunk's tokens, of which `num_taken` belong to the answer.
    """
    cut = sampling_pb2.SpeculationStats()
    cut.CopyFrom(stats)
    position = 0  # of a draft in its round, which ends with a token of the target's own
    for index, is_draft in enumerate(drafted):
        if is_draft and index >= num_taken and position < len(cut.accepted_per_position):
            cut.drafted -= 1
            cut.accepted -= 1
            cut.accepted_per_position[position] -= 1
            cut.unused["finished"] += 1
        position = position + 1 if is_draft else 0
    return cut
