"""The tokens of a step on its device: one go for the rows of all sequences, one wait for the host.

References: `choose_tokens` in outrider/engine/choosing.py. Penalties and bias are written into a
copy of the rows, because logprobs are of logits as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider_kernels.choice import Choice, RowEdits
from outrider_kernels.triton_ops.edits import edit
from outrider_kernels.triton_ops.launch import send
from outrider_kernels.triton_ops.matching import accept
from outrider_kernels.triton_ops.rejection import reject
from outrider_kernels.triton_ops.rounds import Rounds
from outrider_kernels.triton_ops.sampling import choose as choose_rows
from outrider_kernels.triton_ops.settings import RowSettings, settings_table

NO_EDITS = RowEdits()


def choose(choices: Sequence[Choice]) -> list[list[int]]:
    """The tokens of each choice, up to the first that is not the draft; filters as in the engine.

    With draft_probs drafts stand by chance, as in the engine's rejection. -1 stands for a row that
    holds anything but numbers, or has no finite best. ValueError for rows that are not there.
    """
    by_match = [choice for choice in choices if not choice.draft_probs]
    by_chance = [choice for choice in choices if choice.draft_probs]
    tables = []
    for mine, verify in ((by_match, _match), (by_chance, _reject)):
        if mine:
            tokens, counts = verify(mine, *_rows_and_settings(mine))
            tables.append(torch.cat([counts[:, None], tokens], 1))
    if not tables:
        return []
    found = [row[1 : 1 + row[0]] for row in torch.cat(tables).tolist()]  # the wait
    matched, drawn = iter(found[: len(by_match)]), iter(found[len(by_match) :])
    return [next(drawn if choice.draft_probs else matched) for choice in choices]


def warm(logits: torch.Tensor) -> None:
    """Compile all that `choose` may need, on the first of some rows of float32 logits."""
    draft = Choice(logits[[0, 0]], logits.shape[1], 0, [0], 0, 1.0, 0, 1.0, 0.0)
    edits = [RowEdits(bias={0: 0.0})] * 2
    choose([draft._replace(edits=edits), draft._replace(draft_probs=[{0: 1.0}])])


def _match(
    choices: Sequence[Choice], rows: torch.Tensor, settings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rounds = Rounds.pack([choice.drafts for choice in choices], device=rows.device)
    return accept(choose_rows(rows, settings), rounds)


def _reject(
    choices: Sequence[Choice], rows: torch.Tensor, settings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    probs = [choice.draft_probs for choice in choices]
    drafts = [choice.drafts for choice in choices]
    return reject(rows, settings, Rounds.pack(drafts, probs, rows.device))


def _rows_and_settings(choices: Sequence[Choice]) -> tuple[torch.Tensor, torch.Tensor]:
    """All of their rows, edited, float32 [rows, vocab]; and how each of them is chosen from."""
    whole, is_whole = choices[0].logits, True
    parts: list[torch.Tensor] = []
    settings: list[RowSettings] = []
    edits: list[RowEdits] = []
    for choice in choices:
        count, (height, width) = 1 + len(choice.drafts), choice.logits.shape
        if not 0 <= choice.first <= height - count or not 0 < choice.num_ids <= width:
            raise ValueError(f"logits of {[height, width]} do not fit {count} rows")
        is_whole &= choice.logits is whole and choice.first == len(settings)
        parts.append(choice.logits[choice.first : choice.first + count])
        edits += choice.edits or [NO_EDITS] * count
        filters = (choice.seed, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
        places = range(choice.position, choice.position + count)
        settings += [RowSettings(place, choice.num_ids, *filters) for place in places]
    if any(choice.edits for choice in choices):
        rows = torch.cat(parts)
        edit(rows, edits)
    elif is_whole and len(settings) == len(whole):
        rows = whole  # mostly all rows of a step are wanted
    else:
        rows = torch.cat(parts)
    return rows, send(settings_table(settings), rows.device)
