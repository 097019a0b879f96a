"""What the HTTP port counts of connections and answers, whatever they were about."""

from __future__ import annotations

from dataclasses import dataclass, field

_CLASSES = ("2xx", "4xx", "5xx")


@dataclass(slots=True)
class HttpTotals:
    """Since the start. Many answers are to what is no request for text, or no request at all."""

    accepted: int = 0
    """Connections."""
    established: int = 0
    """Of these, what is behind its TLS handshake, or needs none."""
    open: int = 0
    """Of these, what has not ended."""
    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CLASSES, 0))
    """By the class of their status."""

    def answered(self, status: int) -> None:
        """An answer begins."""
        self.answers[f"{status // 100}xx"] += 1
