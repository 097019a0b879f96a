"""What the engine counts: requests and tokens, and what drafts did.

Status, metrics and log lines all read these. Nothing here ever falls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Counts since the start. started = finished + failed + cancelled + running + waiting."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    last_step_s: float = 0.0
    last_step_time: float = 0.0
    """When the last step ended, in Unix time; 0 before the first."""
    busy_s: float = 0.0
    """Seconds that the device worked, on steps that failed too."""

    def add_step(self, seconds: float) -> None:
        """Count one step, whether it failed or not."""
        self.steps += 1
        self.busy_s += seconds
        self.last_step_s = seconds
        self.last_step_time = time.time()


@dataclass(slots=True)
class SpeculationCounts:
    """What drafts did; a request has one and the service another."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    plain_steps: int = 0

    def add_round(self, drafted: int, accepted: int) -> None:
        """Count one verification; without drafts it is a plain step."""
        if drafted == 0:
            self.plain_steps += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(0, missing))
        for position in range(accepted):
            self.accepted_per_position[position] += 1


@dataclass(frozen=True, slots=True)
class SpeculationSnapshot:
    """What drafts had done for one request when a round was over."""

    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    plain_steps: int
    unused: dict[str, int]
