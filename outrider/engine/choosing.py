"""The next tokens of all sequences of a step: in one call of compiled code, where there is any.

What is chosen is `sampling`'s, to the last bit; here it is decided only who computes it. Settings
that change logits by what was said before (penalties, bias, a minimum length) and drafts that stand
by chance go to operations that choose on their device with all others: what a draft's row follows
is known before. Elsewhere they are looked at row by row, and no row behind the last that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outrider.engine.rejection import replacement
from outrider.engine.sampling import BadLogits, TokenChooser, logprobs
from outrider.engine.sparse_probs import SparseProbs
from outrider_kernels.choice import Choice
from outrider_kernels.triton_ops.launch import send

Choose = Callable[[Sequence[Choice]], list[list[int]]]
"""An operation of `outrider_kernels.ops.Ops`."""


class Rows(NamedTuple):
    """One sequence's rows of a step."""

    logits: torch.Tensor
    """float32 [num_rows, vocab], of the whole step maybe"""
    chooser: TokenChooser
    confirmed: Sequence[int]
    """The sequence's tokens before the first row's."""
    drafts: Sequence[int] = ()
    """What the rows but the last must give for the next one to count."""
    first: int = 0
    """Which row is its first one; it has 1 + len(drafts)."""
    draft_probs: Sequence[SparseProbs] = ()
    """What each draft was drawn from, if it is to stand by chance."""

    @property
    def own(self) -> torch.Tensor:
        """Its rows, and of them the ids that it chooses from."""
        last = self.first + len(self.drafts)
        return self.logits[self.first : last + 1, : self.chooser.vocab_size]

    def history(self, row: int) -> list[int]:
        """The tokens before that row's, if the drafts before it stand."""
        return [*self.confirmed, *self.drafts[:row]]


def choose_tokens(
    wanted: Sequence[Rows], choose: Choose | None, *, on_device: bool = False
) -> list[list[int] | Exception]:
    """Of each, the tokens up to the first that is not the draft; or why there are none.

    choose, on_device: as `Ops.choose` and `Ops.chooses_on_device`; None is numpy alone.
    """
    found: list[list[int] | Exception] = [[] for _ in wanted]
    together: list[tuple[int, Choice]] = []
    for i, rows in enumerate(wanted):
        try:
            is_plain = rows.chooser.takes_logits_as_they_are(len(rows.confirmed))
            if on_device:
                together.append((i, _choice_with_all(rows, is_plain)))
            elif rows.draft_probs:
                found[i] = _by_chance(rows)
            elif is_plain and choose is not None:
                position = len(rows.confirmed)
                choice = rows.chooser.choice(rows.logits, position, rows.drafts, rows.first)
                together.append((i, choice))
            else:
                found[i] = _row_by_row(rows, choose)
        except Exception as error:
            found[i] = error
    if choose is not None and together:
        tokens = choose([choice for _, choice in together])
        for (i, _), chosen in zip(together, tokens, strict=True):
            found[i] = chosen if chosen[-1] >= 0 else _bad_logits(wanted[i], len(chosen) - 1)
    return found


def token_logprobs(
    logits: torch.Tensor,  # float32 [num_rows, vocab]
    rows: Sequence[int],
    tokens: Sequence[int],
    *,
    on_device: bool,
) -> list[float]:
    """Of one token of each row, before any setting; on_device: in one go where logits lie."""
    if not on_device:
        pairs = zip(rows, tokens, strict=True)
        return [logprobs(logits[row], token)[0] for row, token in pairs]
    if not rows:
        return []  # nobody waits for a step without tokens
    places = send(torch.tensor([rows, tokens], dtype=torch.int64), logits.device)
    own = logits.index_select(0, places[0])
    chosen = own.gather(1, places[1, :, None]).squeeze(1)
    return (chosen - own.logsumexp(1)).tolist()


def _choice_with_all(rows: Rows, is_plain: bool) -> Choice:
    """For operations that change logits, and let drafts stand by chance, where logits lie."""
    chooser, num_rows = rows.chooser, 1 + len(rows.drafts)
    choice = chooser.choice(rows.logits, len(rows.confirmed), rows.drafts, rows.first)
    if not is_plain:
        edits = [chooser.edits(rows.history(row)) for row in range(num_rows)]
        choice = choice._replace(edits=edits)
    probs = [dict(zip(each.ids, each.probs, strict=True)) for each in rows.draft_probs]
    return choice._replace(draft_probs=probs)


def _row_by_row(rows: Rows, choose: Choose | None) -> list[int]:
    history, chooser = rows.history(0), rows.chooser
    chosen: list[int] = []
    for row, draft in zip(rows.own, [*rows.drafts, None], strict=True):
        if choose is None:
            token = chooser.choose(row, history)
        else:
            choice = chooser.choice(chooser.adjusted(row, history)[None], len(history))
            token = choose([choice])[0][0]
            if token < 0:
                raise _bad_logits(rows, len(chosen))
        chosen.append(token)
        if token != draft:
            break
        history.append(token)
    return chosen


def _by_chance(rows: Rows) -> list[int]:
    """Keep drafts by chance, each against the distribution that it was drawn from.

    Nothing here may skip a draft for what it is: that would change the distribution of the text.
    """
    history, drafts, own = rows.history(0), rows.drafts, rows.own
    for i, (draft, probs) in enumerate(zip(drafts, rows.draft_probs, strict=True)):
        instead = replacement(rows.chooser, own[i], history, draft, probs)
        if instead is not None:
            return [*drafts[:i], instead]
        history.append(draft)
    return [*drafts, rows.chooser.choose(own[len(drafts)], history)]


def _bad_logits(rows: Rows, row: int) -> BadLogits:
    best = rows.chooser.adjusted(rows.own[row].cpu(), rows.history(row)).max()
    return BadLogits(f"the best logit is {best:g}")
