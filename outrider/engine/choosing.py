"""The next tokens of all sequences of a step: in one call of compiled code, where there is any.

What is chosen is `sampling`'s, to the last bit; here it is decided only who computes it. Settings
that change logits by what was said before (penalties, bias, a minimum length) are applied row by
row, as each row has a history of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outrider.engine.sampling import BadLogits, TokenChooser
from outrider_kernels.native_sampling import Choice

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


def choose_tokens(wanted: Sequence[Rows], choose: Choose | None) -> list[list[int] | Exception]:
    """Of each, the tokens up to the first that is not the draft; or why there are none.

    choose: None for numpy alone.
    """
    found: list[list[int] | Exception] = [[] for _ in wanted]
    plain: list[tuple[int, Choice]] = []
    for i, rows in enumerate(wanted):
        try:
            position = len(rows.confirmed)
            if choose is not None and rows.chooser.takes_logits_as_they_are(position):
                choice = rows.chooser.choice(rows.logits, position, rows.drafts, rows.first)
                plain.append((i, choice))
            else:
                found[i] = _row_by_row(rows, choose)
        except Exception as error:
            found[i] = error
    if choose is not None and plain:
        tokens = choose([choice for _, choice in plain])
        for (i, choice), chosen in zip(plain, tokens, strict=True):
            found[i] = chosen if chosen[-1] >= 0 else _bad_logits(choice, len(chosen) - 1)
    return found


def _row_by_row(rows: Rows, choose: Choose | None) -> list[int]:
    history, chooser = [*rows.confirmed], rows.chooser
    chosen: list[int] = []
    drafts = [*rows.drafts, None]
    logits = rows.logits[rows.first : rows.first + len(drafts)]
    for row, draft in zip(logits, drafts, strict=True):
        if choose is None:
            token = chooser.choose(row, history)
        else:
            choice = chooser.choice(chooser.adjusted(row, history)[None], len(history))
            token = choose([choice])[0][0]
            if token < 0:
                raise _bad_logits(choice, 0)
        chosen.append(token)
        if token != draft:
            break
        history.append(token)
    return chosen


def _bad_logits(choice: Choice, row: int) -> BadLogits:
    best = choice.logits[choice.first + row, : choice.num_ids].max()
    return BadLogits(f"the best logit is {best:g}")
