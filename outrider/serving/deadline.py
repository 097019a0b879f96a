"""Whether a call that was cancelled has ended because of its client's deadline."""

from __future__ import annotations

from dataclasses import dataclass

_SLACK_S, _SLACK_SHARE = 0.05, 0.02
"""How much later a deadline is here than at the client: a deadline travels rounded up by a percent,
and takes its time."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A client's patience: seconds in all, and what was left when its call ended."""

    total_s: float | None
    remaining_s: float | None

    @property
    def passed(self) -> bool:
        """The call ended because of it."""
        if self.total_s is None or self.remaining_s is None:
            return False
        return self.remaining_s <= _SLACK_S + _SLACK_SHARE * self.total_s
