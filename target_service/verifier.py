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
from outrider.engine.rejection import replacement
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser, logprobs
from outrider.engine.sparse_probs import SparseProbs
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
        """The target's own tokens for all shares that want them and are not left to chance.

        Drafts stand while they equal those (Daliri et al., arXiv 2408.07978).
        """
        wanted: dict[int, Rows] = {}
        first = 0
        for i, (share, item) in enumerate(zip(plan.shares, plan.batch.items, strict=True)):
            if item.num_logits > share.num_prompt_rows and not share.draft_probs:
                row = first + share.num_prompt_rows
                confirmed = share.request.sequence.token_ids
                wanted[i] = Rows(logits, _chooser(share), confirmed, share.drafts, row)
            first += item.num_logits
        found = choose_tokens(list(wanted.values()), self._runner.model.ops.choose)
        return dict(zip(wanted, found, strict=True))


Outcome = Verdict | Failure | None


def judge(
    logits: torch.Tensor,  # [num_logits of the step, vocab]
    first: int,
    chosen: list[int] | Exception | None,
    share: Planned,
    item: BatchItem,
) -> Verdict:
    """All that is to be said of one share of a step, whose rows of logits begin at `first`.

    `chosen` are the target's own tokens.
    """
    if isinstance(chosen, Exception):
        raise chosen
    answer = share.request.params.answer
    if chosen is not None and answer.logprobs is None and not share.request.scores_prompt:
        return Verdict(chosen, len(chosen) - 1)
    first_choosing = first + share.num_prompt_rows
    prompt = score_prompt(logits[first:first_choosing], share, item.start)
    rows = logits[first_choosing : first + item.num_logits]
    if not len(rows):
        return Verdict([], 0, prompt=prompt)
    if chosen is None:
        confirmed = share.request.sequence.token_ids
        verdict = verify_by_rejection(
            rows, _chooser(share), confirmed, share.drafts, share.draft_probs
        )
    else:
        verdict = Verdict(chosen, len(chosen) - 1)
    wanted = answer.logprobs
    if wanted is None and not prompt:
        return verdict
    scores = [] if wanted is None else _score(rows, verdict.tokens, wanted)
    return Verdict(verdict.tokens, verdict.num_accepted, scores, prompt)


def verify_by_rejection(
    logits: torch.Tensor,  # [1 + len(drafts), vocab]
    chooser: TokenChooser,
    confirmed: Sequence[int],
    drafts: Sequence[int],
    draft_probs: Sequence[SparseProbs],
) -> Verdict:
    """Keep drafts by chance, each against the distribution that it was drawn from.

    Nothing here may skip a draft for what it is: that would change the distribution of the text.
    """
    history = [*confirmed]
    for i, (draft, probs) in enumerate(zip(drafts, draft_probs, strict=True)):
        instead = replacement(chooser, logits[i], history, draft, probs)
        if instead is not None:
            return Verdict([*drafts[:i], instead], i)
        history.append(draft)
    bonus = chooser.choose(logits[len(drafts)], history)
    return Verdict([*drafts, bonus], len(drafts))


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
