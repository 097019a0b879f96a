"""Parts of a target for tests of its policy: requests and outputs without a service."""

from __future__ import annotations

from collections.abc import Collection

from outrider.engine.prefix import BlockChain
from outrider.engine.sequence import Sequence
from outrider.params import (
    GenerationParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    VerificationMode,
)
from target_service.draft_link import DraftedSequence, SequenceFacts
from target_service.draft_tail import DraftTail, DraftTotals
from target_service.request import Output, Piece, Reason, Request, Token
from target_service.window import SequenceWindow, StepCost

VOCAB_SIZE = 1000
MAX_DRAFT_TOKENS = 4
MAX_WINDOW = 9


class CollectedOutput:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.full = False
        self.tokens: list[Token] = []
        self.reason: Reason | None = None
        self.error: Exception | None = None
        self.num_ends = 0

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return [token.id for token in self.tokens]

    def put(self, piece: Piece) -> None:
        """Deliver tokens."""
        assert not self.num_ends, "tokens behind the end"
        self.tokens.extend(piece.tokens)
        if piece.reason is not None:
            self.reason = piece.reason
            self.num_ends += 1

    def fail(self, error: Exception) -> None:
        """End with an error."""
        assert not self.num_ends, "two ends"
        self.error = error
        self.num_ends += 1


def make_request(
    prompt: list[int],
    max_tokens: int,
    *,
    output: Output | None = None,
    mode: SpeculationMode = SpeculationMode.OFF,
    draft_tokens: int | None = None,
    priority: int = 0,
    stop_ids: Collection[int] = (),
    max_wait_s: float = 0.05,
    cost: StepCost | None = None,
    totals: DraftTotals | None = None,
) -> Request:
    """An admitted request."""
    sequence = Sequence(list(prompt), len(prompt))
    params = GenerationParams(
        SamplingParams(),
        StoppingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop_ids)),
        SpeculationParams(mode=mode, max_draft_tokens=draft_tokens),
    )
    window = SequenceWindow(
        params.speculation,
        cost or StepCost(),
        max_draft_tokens=MAX_DRAFT_TOKENS,
        max_window=MAX_WINDOW,
        max_wait_s=max_wait_s,
    )
    drafts = None
    if window.wants_drafts:
        ids = sequence.token_ids
        tail = DraftTail(ids, VOCAB_SIZE, MAX_WINDOW, totals or DraftTotals())
        drafts = DraftedSequence(ids, tail, make_facts(len(prompt)))
    return Request(
        request_id="test",
        sequence=sequence,
        params=params,
        output=output or CollectedOutput(),
        max_len=len(prompt) + max_tokens,
        stop_ids=frozenset(stop_ids),
        priority=priority,
        window=window,
        drafts=drafts,
        chain=BlockChain(b"", 16),
        chooser=None,
    )


def make_facts(prompt_len: int, sampling: SamplingParams | None = None) -> SequenceFacts:
    """What a drafter is told of a sequence."""
    return SequenceFacts(
        prompt_len=prompt_len,
        max_len=4096,
        sampling=sampling or SamplingParams(temperature=0.0),
        partition=b"",
        verification=VerificationMode.EXACT_MATCH,
        min_tokens=0,
        stop_token_ids=(),
    )
