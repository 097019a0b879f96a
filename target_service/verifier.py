"""One step on the device: forward the batch, then check every draft against the target's choice.

EXACT_MATCH: the target's next token at a position is a function of logits, settings, seed and
position alone. A draft stands while it equals that token; the first that differs is replaced by it
(recovered), and after all of them comes one more (bonus). So the text never depends on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser
from target_service.scheduler import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says after one round of one sequence."""

    tokens: list[int]
    """The accepted drafts, then the recovered or bonus token."""
    num_accepted: int


class Verifier:
    """Runs plans. Every call happens on the device thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: Plan) -> list[Verdict | None]:
        """One verdict a share, None for a chunk that does not end its prefix."""
        logits = self._runner.forward(plan.batch)  # [num_logits, vocab]
        verdicts: list[Verdict | None] = []
        row = 0
        for share, item in zip(plan.shares, plan.batch.items, strict=True):
            if item.num_logits == 0:
                verdicts.append(None)
                continue
            chooser = share.request.chooser
            assert isinstance(chooser, TokenChooser)
            rows = logits[row : row + item.num_logits]
            verdicts.append(verify(rows, chooser, share.request.sequence.token_ids, share.drafts))
            row += item.num_logits
        return verdicts


def verify(
    logits: torch.Tensor,  # [1 + len(drafts), vocab]
    chooser: TokenChooser,
    confirmed: Sequence[int],
    drafts: Sequence[int],
) -> Verdict:
    """Accept drafts while they equal the target's own choice (Daliri et al., arXiv 2408.07978)."""
    history = [*confirmed]
    chosen: list[int] = []
    for position in range(1 + len(drafts)):
        token = chooser.choose(logits[position], history)
        chosen.append(token)
        if position == len(drafts) or drafts[position] != token:
            break
        history.append(token)
    return Verdict(tokens=chosen, num_accepted=len(chosen) - 1)
