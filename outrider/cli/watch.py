"""Looks whether the services of a stack still serve, and says in one line when one does not.

A process that has ended is somebody else's business; here it is the one that stays and is of no
use, such as a target whose engine has died.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.cli.stack import START_TIMEOUT_S, Child, Stack, serves


@dataclass(slots=True)
class _Seen:
    """What was seen of one process."""

    pid: int
    served_at: float
    """When it last served, or was first looked at."""
    served: bool = False
    told: bool = False


class HealthWatch:
    """Told by `say`, once for each time that a service stops or begins again to serve."""

    def __init__(
        self,
        stack: Stack,
        say: Callable[[str], None],
        *,
        every_s: float = 2.0,
        patience_s: float = 6.0,
        start_s: float = START_TIMEOUT_S,
    ) -> None:
        """start_s: what a process gets until it first serves."""
        self._stack = stack
        self._say = say
        self._every_s = every_s
        self._patience_s = patience_s
        self._start_s = start_s
        self._next_look = 0.0
        self._seen: dict[str, _Seen] = {}

    def look(self) -> None:
        """Ask all of them, if it is time to."""
        if time.monotonic() < self._next_look:
            return
        for service, child in self._stack.children.items():
            if child.process.poll() is None:
                self._look_at(service, child)
        self._next_look = time.monotonic() + self._every_s

    def _look_at(self, service: str, child: Child) -> None:
        now, pid = time.monotonic(), child.process.pid
        seen = self._seen.get(service)
        if seen is None or seen.pid != pid:
            seen = self._seen[service] = _Seen(pid, now)
        if serves(child):
            if seen.told:
                self._say(f"{service} serves again")
            seen.served_at, seen.served, seen.told = now, True, False
            return
        silent_s = now - seen.served_at
        if seen.told or silent_s < (self._patience_s if seen.served else self._start_s):
            return
        seen.told = True
        trouble = f"{service} runs but has not served for {silent_s:.0f} s"
        if service == "draft":
            child.process.kill()  # nothing is lost with it, and a new one may serve
            trouble += "; it is ended"
        self._say(trouble)
