"""What the draft service asks of a way to guess tokens. Knows neither torch nor gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.sessions import Session


@dataclass(frozen=True, slots=True)
class ProposerIdentity:
    """What a proposer is, as targets and operators see it."""

    proposer: str
    """"ngram" or "model"."""
    max_len: int
    """Tokens of one sequence, the tail included."""
    model: str = ""
    """The model's name; empty without one."""
    weights_fingerprint: str = ""
    """Hex SHA-256 of the weights; empty without weights."""
    precision: str = ""
    """Of the weights, as the target's says it; empty without weights."""
    token_table_hash: bytes = b""
    """Empty: it works on ids alone and matches every table."""
    vocab_size: int = 0
    """Ids that it knows; 0: any."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The paged cache of a proposer that has one."""

    total: int
    free: int
    block_size: int
    wasted_slots: int
    integrity_errors: tuple[str, ...] = ()
    kv_dtype: str = ""
    """Of keys and values: "float32", "bfloat16" or "int8"."""
    block_bytes: int = 0
    """Memory of a block, in all layers."""


class Proposer(Protocol):
    """Extends the tails of sequences. Called from the event loop only."""

    @property
    def identity(self) -> ProposerIdentity:
        """What it is; does not change."""

    def open(self, session: Session) -> None:
        """A sequence begins; it has no tokens yet."""

    def close(self, session: Session) -> None:
        """A sequence has ended; free what belongs to it."""

    async def propose(self, sessions: Sequence[Session]) -> list[Session]:
        """One step: extend the tails of some of `sessions`, all of which want tokens.

        Returns those that have changed. One for which nothing is found gets `dry` set. Updates may
        be applied and sessions closed while this awaits; the rest of the sessions come again.
        """

    def pool(self) -> PoolReport | None:
        """The state of its cache, checked now."""

    def shutdown(self) -> None:
        """Free everything; no call follows."""
