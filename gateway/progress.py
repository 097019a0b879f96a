"""How far a request has come at the targets that served it so far: what another one must know.

Makes the rest of the request, and the next target's chunks look as if the first had sent them.
"""

from __future__ import annotations

from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1 import target_pb2 as pb


class Progress:
    """Counts what was taken from all targets together."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._finished: set[int] = set()
        self._num_prompt_tokens = 0  # delivered with their log-probabilities
        self._skip_prompt_tokens = 0  # of the present target, which sends them once more
        # What drafts did at the targets before the present one, and in all.
        self._stats_before = sampling_pb2.SpeculationStats()
        self._stats = sampling_pb2.SpeculationStats()

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(len(ids) for ids in self._token_ids)

    @property
    def started(self) -> bool:
        """Something was delivered, so only the same text may follow."""
        return bool(self.num_tokens or self._num_prompt_tokens or self._finished)

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        return len(self._finished) == self._num_choices

    def can_resume(self, request: pb.TokenRequest) -> bool:
        """A target can go on from here: it takes the tokens of one choice, and must add some."""
        if not self.num_tokens:
            return not self._finished
        cap = request.stopping.max_tokens
        return self._num_choices == 1 and not self._finished and self.num_tokens < cap

    def rest_of(self, request: pb.TokenRequest) -> pb.TokenRequest:
        """What to ask the next target for; before anything was taken, the request itself."""
        self._stats_before.CopyFrom(self._stats)
        self._skip_prompt_tokens = self._num_prompt_tokens
        if not self.num_tokens:
            return request
        rest = pb.TokenRequest()
        rest.CopyFrom(request)
        rest.resumed_token_ids.extend(self._token_ids[0])
        # They come before the first generated token, so all of them were delivered.
        rest.ClearField("prompt_logprobs")
        return rest

    def take(self, chunk: pb.TokenChunk) -> pb.TokenChunk:
        """The chunk as the client's stream continues; counts it."""
        if chunk.index >= self._num_choices:
            return chunk  # refused behind here
        if self._skip_prompt_tokens:
            skipped = min(self._skip_prompt_tokens, len(chunk.prompt_tokens))
            del chunk.prompt_tokens[:skipped]
            self._skip_prompt_tokens -= skipped
        if self._num_choices == 1:
            add(chunk.speculation, self._stats_before)
            if chunk.HasField("finish"):
                add(chunk.finish.speculation, self._stats_before)
            self._stats.CopyFrom(chunk.speculation)
        self._num_prompt_tokens += len(chunk.prompt_tokens)
        self._token_ids[chunk.index].extend(token.id for token in chunk.tokens)
        if chunk.HasField("finish"):
            self._finished.add(chunk.index)
        return chunk


def add(stats: sampling_pb2.SpeculationStats, before: sampling_pb2.SpeculationStats) -> None:
    """Add to `stats` what happened before."""
    stats.rounds += before.rounds
    stats.drafted += before.drafted
    stats.accepted += before.accepted
    stats.plain_steps += before.plain_steps
    missing = len(before.accepted_per_position) - len(stats.accepted_per_position)
    stats.accepted_per_position.extend([0] * max(0, missing))
    for position, count in enumerate(before.accepted_per_position):
        stats.accepted_per_position[position] += count
    for reason, count in before.unused.items():
        stats.unused[reason] += count
