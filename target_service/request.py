"""One admitted request: its sequence, its settings, and what has been made of it so far.

Knows nothing of gRPC, asyncio or torch; the scheduler and the batcher share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from outrider.engine.prefix import BlockChain
from outrider.engine.sequence import Sequence
from outrider.params import GenerationParams
from target_service.counts import SpeculationCounts, SpeculationSnapshot
from target_service.window import SequenceWindow

if TYPE_CHECKING:
    from target_service.draft_link import DraftedSequence
    from target_service.record import ChoiceTrace


class Reason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model thinks of one token: its raw log-softmax, before any setting."""

    value: float
    top: tuple[tuple[int, float], ...]
    """The likeliest (token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    drafted: bool
    logprobs: Logprobs | None = None
    """Set when they were asked for."""


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt."""

    id: int
    logprobs: Logprobs | None
    """None for the first, before which there is nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one round, and the end if it has come."""

    tokens: list[Token]
    reason: Reason | None
    speculation: SpeculationSnapshot
    index: int = 0
    """Which choice of the request."""
    prompt: list[PromptToken] = field(default_factory=list)
    """The next tokens of the prompt, when their log-probabilities were asked for."""


class Output(Protocol):
    """Where a request's tokens go. Both calls are immediate."""

    full: bool
    """The reader is so far behind that no more should be made."""

    def put(self, piece: Piece) -> None:
        """Deliver the tokens of a round."""

    def fail(self, error: Exception) -> None:
        """End with an error."""


@dataclass(eq=False, slots=True)
class Request:
    """A request from its admission to its end."""

    request_id: str
    sequence: Sequence
    params: GenerationParams
    output: Output
    max_len: int
    """Length of the sequence at which it ends."""
    stop_ids: frozenset[int]
    """Ids that end it, end-of-sequence ids included unless ignored."""
    priority: int
    window: SequenceWindow
    drafts: DraftedSequence | None
    chain: BlockChain
    """Names of its full blocks, for the prefix cache."""
    chooser: object
    """An engine TokenChooser; only the device thread looks inside."""
    index: int = 0
    """Which choice of the caller's request."""
    after: Request | None = None
    """The choice whose prompt this one shares."""
    arrival: int = 0
    """How many joined the waiting line before it."""
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    num_cached: int | None = None
    """Prompt tokens that came from the prefix cache, known once it has run."""
    num_scored: int = 0
    """Prompt tokens whose log-probabilities were delivered."""
    submitted_s: float = 0.0
    """When it joined the waiting line; monotonic, as the next ones."""
    scheduled_s: float | None = None
    """When its first step began."""
    first_token_s: float | None = None
    """When its first token was made here."""
    ended_s: float | None = None
    ended: bool = False
    reason: Reason | None = None
    """Set when it ended by itself."""
    num_preemptions: int = 0
    """Times that it gave its blocks back to go on later."""
    trace: ChoiceTrace | None = None
    """Set when the request has spans."""

    @property
    def num_generated(self) -> int:
        """Tokens generated, resumed ones included."""
        return self.sequence.num_generated

    @property
    def may_start(self) -> bool:
        """The prompt that it shares is computed, or will not be."""
        return self.after is None or self.after.ended or self.after.num_generated > 0

    @property
    def room_for_drafts(self) -> int:
        """Drafts that can still matter: the last token is always the target's own."""
        return max(0, self.max_len - self.sequence.num_tokens - 1)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of prompt tokens are still wanted."""
        wanted = self.params.answer.prompt_logprobs is not None
        return wanted and self.num_scored < self.sequence.prompt_len

    @property
    def num_cacheable(self) -> int:
        """How many of its first tokens may come from the prefix cache, which holds no logits."""
        last = self.num_scored if self.scores_prompt else self.sequence.num_tokens
        return max(0, last - 1)

    def speculation(self) -> SpeculationSnapshot:
        """What drafts have done so far."""
        counts = self.counts
        unused = self.drafts.tail.unused if self.drafts is not None else {}
        return SpeculationSnapshot(
            rounds=counts.rounds,
            drafted=counts.drafted,
            accepted=counts.accepted,
            accepted_per_position=tuple(counts.accepted_per_position),
            plain_steps=counts.plain_steps,
            unused={reason.value: count for reason, count in unused.items()},
        )
