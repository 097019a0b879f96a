"""What is verified in a step: sequences, their drafts, and what these were drawn from.

Rows of a sequence follow each other, one for each draft and one for the token behind them; a row
holds the draft that it is to judge, or -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider_kernels.triton_ops.configs_sampling import MAX_DRAFTS, SPARSE_ENTRIES
from outrider_kernels.triton_ops.launch import send

NO_ID = 0x7FFFFFFF
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rounds:
    """What is verified in a step, on the device; see `pack`."""

    sequences: torch.Tensor
    """int32 [num_sequences, 2]: first row, number of drafts."""
    drafts: torch.Tensor
    """int64 [rows]: the draft that a row judges, -1 in a sequence's last row."""
    draft_ids: torch.Tensor | None = None
    """int32 [rows, SPARSE_ENTRIES]: of the draft's distribution, rising, then NO_ID."""
    draft_probs: torch.Tensor | None = None
    """float32, beside them."""

    @staticmethod
    def pack(
        drafts: Sequence[Sequence[int]],
        draft_probs: Sequence[Sequence[Mapping[int, float]]] | None = None,
        device: torch.device = _CPU,
    ) -> Rounds:
        """Of each sequence's drafts, and for rejection the distribution that each was drawn from.

        ValueError for more than MAX_DRAFTS drafts or SPARSE_ENTRIES entries, and for a draft that
        its own distribution gives no chance.
        """
        if any(len(mine) > MAX_DRAFTS for mine in drafts):
            raise ValueError(f"at most {MAX_DRAFTS} drafts of a sequence are supported")
        starts = np.cumsum([0, *(len(mine) + 1 for mine in drafts)])
        sequences = np.array([*zip(starts[:-1], map(len, drafts), strict=True)], np.int32)
        rows = np.array([draft for mine in drafts for draft in (*mine, -1)], np.int64)
        packed = Rounds(
            send(torch.from_numpy(sequences.reshape(-1, 2)), device),
            send(torch.from_numpy(rows), device),
        )
        if draft_probs is None:
            return packed
        ids = np.full((len(rows), SPARSE_ENTRIES), NO_ID, np.int32)
        probs = np.zeros((len(rows), SPARSE_ENTRIES), np.float32)
        of_rows = [entries for mine in draft_probs for entries in (*mine, {})]
        for row, (draft, entries) in enumerate(zip(rows.tolist(), of_rows, strict=True)):
            if len(entries) > SPARSE_ENTRIES or (draft >= 0 and not entries.get(draft, 0) > 0):
                raise ValueError(f"draft {draft} does not come from {len(entries)} entries")
            # Ids that no vocabulary has may be any number; what they weigh counts all the same.
            ids[row, : len(entries)] = np.minimum(sorted(entries), NO_ID)
            probs[row, : len(entries)] = [entries[i] for i in sorted(entries)]
        return Rounds(
            packed.sequences,
            packed.drafts,
            send(torch.from_numpy(ids), device),
            send(torch.from_numpy(probs), device),
        )

    def check(self, num_rows: int) -> None:
        """ValueError unless there is a row for each draft and each sequence."""
        if num_rows != len(self.drafts):
            raise ValueError(f"{num_rows} rows are not the {len(self.drafts)} of the rounds")

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for tokens int64 [sequences, 1 + MAX_DRAFTS], and for their numbers, int32."""
        num, device = len(self.sequences), self.sequences.device
        tokens = torch.empty((num, 1 + MAX_DRAFTS), dtype=torch.int64, device=device)
        return tokens, torch.empty(num, dtype=torch.int32, device=device)
