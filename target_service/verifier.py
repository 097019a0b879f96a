"""One step on the device: forward the batch, then check every draft against the target's choice.

EXACT_MATCH: the target's next token at a position is a function of logits, settings, seed and
position alone. A draft stands while it equals that token; the first that differs is replaced by it
(recovered), and after all of them comes one more (bonus). So the text never depends on the drafts.

REJECTION: a draft stands or is replaced by chance, so that the text has the target's distribution.
It depends on the drafts; only the bonus token is chosen as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.batch import BatchItem
from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser, logprobs
from target_service.request import Logprobs, PromptToken
from target_service.scheduler import Plan, Planned


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says after one round of one sequence."""

    tokens: list[int]
    """The accepted drafts, then the recovered or bonus token; empty for a chunk of a prompt."""
    num_accepted: int
    logprobs: list[Logprobs] = field(default_factory=list)
    """One a token, when they were asked for."""
    prompt: list[PromptToken] = field(default_factory=list)
    """The next tokens of the prompt, when those were asked for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One share of a step cannot be judged; the others can."""

    error: Exception


class Verifier:
    """Runs plans. Every call happens on the device thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: Plan) -> list[Outcome]:
        """One outcome a share, None for a chunk that does not end its prefix.

        Raises what the forward raises: that concerns everybody in the step.
        """
        logits = self._runner.forward(plan.batch)  # [num_logits, vocab]
        chosen = self._choose(plan, logits)
        verdicts: list[Outcome] = []
        first = 0
        for i, (share, item) in enumerate(zip(plan.shares, plan.batch.items, strict=True)):
            if item.num_logits == 0:
                verdicts.append(None)
                continue
            try:
                verdicts.append(judge(logits, first, chosen.get(i), share, item))
            except Exception as error:  # the batcher logs it and fails this request
                verdicts.append(Failure(error))
            first += item.num_logits
        return verdicts

    def _choose(self, plan: Plan, logits: torch.Tensor) -> dict[int, list[int] | Exception]:
        """The tokens of all shares that want them, drafts that stand among them.

        Without chance a draft stands while it is the target's own token (Daliri et al., arXiv
        2408.07978).
        """
        wanted: dict[int, Rows] = {}
        first = 0
        for i, (share, item) in enumerate(zip(plan.shares, plan.batch.items, strict=True)):
            if item.num_logits > share.num_prompt_rows:
                wanted[i] = Rows(
                    logits,
                    _chooser(share),
                    share.request.sequence.token_ids,
                    share.drafts,
                    first + share.num_prompt_rows,
                    share.draft_probs,
                )
            first += item.num_logits
        ops = self._runner.model.ops
        chosen = choose_tokens(list(wanted.values()), ops.choose, on_device=ops.chooses_on_device)
        return dict(zip(wanted, chosen, strict=True))


Outcome = Verdict | Failure | None


def judge(
    logits: torch.Tensor,  # [num_logits of the step, vocab]
    first: int,
    chosen: list[int] | Exception | None,
    share: Planned,
    item: BatchItem,
) -> Verdict:
    """All that is to be said of one share of a step, whose rows of logits begin at `first`.

    `chosen` are its tokens, None for a part of a prompt. Rows are read on the CPU, and only those
    whose log-probabilities are wanted are copied there.
    """
    if isinstance(chosen, Exception):
        raise chosen
    tokens = chosen or []
    num_accepted, wanted = max(len(tokens) - 1, 0), share.request.params.answer.logprobs
    if wanted is None and not share.request.scores_prompt:
        return Verdict(tokens, num_accepted)
    rows = logits[first : first + item.num_logits].cpu()
    prompt = score_prompt(rows[: share.num_prompt_rows], share, item.start)
    scores = [] if wanted is None else _score(rows[share.num_prompt_rows :], tokens, wanted)
    return Verdict(tokens, num_accepted, scores, prompt)


def score_prompt(
    logits: torch.Tensor,  # [num_prompt_rows, vocab]
    share: Planned,
    start: int,
) -> list[PromptToken]:
    """The prompt's next tokens; the row of position i says what token i + 1 is worth."""
    request = share.request
    if not request.scores_prompt:
        return []
    sequence = request.sequence
    wanted = request.params.answer.prompt_logprobs
    assert wanted is not None
    scored = [] if request.num_scored else [PromptToken(sequence.token_ids[0], None)]
    first = max(request.num_scored, 1)
    ids = sequence.token_ids[first : min(start + 1 + len(logits), sequence.prompt_len)]
    scores = _score(logits[first - 1 - start :], ids, wanted)
    return scored + [PromptToken(*each) for each in zip(ids, scores, strict=True)]


def _score(
    logits: torch.Tensor,  # [at least len(token_ids), vocab]
    token_ids: Sequence[int],
    num_top: int,
) -> list[Logprobs]:
    scores = [logprobs(row, token, num_top) for row, token in zip(logits, token_ids, strict=False)]
    return [Logprobs(value, tuple(top)) for value, top in scores]


def _chooser(share: Planned) -> TokenChooser:
    chooser = share.request.chooser
    assert isinstance(chooser, TokenChooser)
    return chooser
