"""The usage of a request: what its choices used, added up."""

from __future__ import annotations

from gateway.http.answer_schema import Usage
from protos.outrider.v1 import inference_pb2 as pb


class UsageTotals:
    """Told of each choice's end."""

    def __init__(self) -> None:
        self._usage: Usage = {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
            "speculation": {
                "rounds": 0,
                "drafted": 0,
                "accepted": 0,
                "accepted_per_position": [],
                "unused": {},
                "plain_steps": 0,
            },
        }

    def add(self, finish: pb.GenerateFinish) -> None:
        """The prompt counts with choice 0 only, as the messages have it."""
        usage, theirs = self._usage, finish.usage
        usage["prompt_tokens"] += theirs.prompt_tokens
        usage["completion_tokens"] += theirs.completion_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        usage["prompt_tokens_details"]["cached_tokens"] += theirs.cached_prompt_tokens
        totals, stats = usage["speculation"], finish.speculation
        totals["rounds"] += stats.rounds
        totals["drafted"] += stats.drafted
        totals["accepted"] += stats.accepted
        totals["plain_steps"] += stats.plain_steps
        positions = totals["accepted_per_position"]
        positions.extend([0] * (len(stats.accepted_per_position) - len(positions)))
        for position, accepted in enumerate(stats.accepted_per_position):
            positions[position] += accepted
        for reason, count in stats.unused.items():
            totals["unused"][reason] = totals["unused"].get(reason, 0) + count

    def usage(self) -> Usage:
        """As it stands."""
        return self._usage
