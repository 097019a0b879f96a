"""A scripted drafter for rejection mode: draws its tokens, and reports from what.

    ScriptedDrafter(Drawing(draw))     draw(history, chance) -> (token, {id: probability} or None)

None leaves the distribution out, which no honest drafter does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from protos.outrider.v1 import draft_pb2
from tests.support.draft_scripts import Reply, ScriptedSequence

Draw = Callable[[list[int], random.Random], tuple[int, Mapping[int, float] | None]]


class Drawing:
    """Keeps a tail for each sequence, as a real drafter does, and fills the window."""

    def __init__(self, draw: Draw, seed: int = 0) -> None:
        self._draw = draw
        self._chance = random.Random(seed)
        self._texts: dict[ScriptedSequence, list[int]] = {}  # confirmed, then the tail

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        """Tokens up to the window's end, each told once."""
        if sequence.window == 0:
            return []
        confirmed = sequence.confirmed
        text = self._texts.get(sequence, [])
        if text[: len(confirmed)] != confirmed:
            text = list(confirmed)
        start = len(text)
        proposal = sequence.proposal(start, [])
        while len(text) < sequence.limit:
            token, probs = self._draw(text, self._chance)
            text.append(token)
            proposal.tokens.append(token)
            if probs is not None:
                sparse = draft_pb2.SparseProbs(ids=probs.keys(), probs=probs.values())
                proposal.sparse_probs.append(sparse)
        self._texts[sequence] = text
        return [Reply(draft_pb2.SpeculateResponse(proposals=[proposal]))]
