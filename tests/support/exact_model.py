"""What a model's sampled text must look like: exact probabilities, step by step and in own words.

Settings here are temperature, top_k, top_p and min_p; the prompt comes first, in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from tests.support.precision import chosen_dtype

_NUM_BLOCKS = 8


class ExactModel:
    """One model, asked one text at a time; answers are remembered."""

    def __init__(self, folder: Path) -> None:
        self._runner = Runner(LlamaModel.load(folder, chosen_dtype()), _NUM_BLOCKS)
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, history: Sequence[int]) -> np.ndarray:
        """What predicts the token behind `history`, float64 [vocab]."""
        key = tuple(history)
        if key not in self._rows:
            item = BatchItem(list(history), 0, list(range(_NUM_BLOCKS)), 1)
            row = self._runner.forward(Batch([item]))[0].double().numpy()
            row[self._runner.model.config.num_tokens :] = -np.inf  # padding
            self._rows[key] = row
        return self._rows[key]

    def probs(self, history: Sequence[int], settings: Mapping[str, float]) -> dict[int, float]:
        """The filtered distribution behind `history`, likeliest first."""
        logits = self.logits(history)
        weights = np.exp((logits - logits.max()) / settings.get("temperature", 1.0))
        order = np.argsort(-weights, kind="stable")
        if settings.get("top_k"):
            order = order[: int(settings["top_k"])]
        shares = weights[order] / weights[order].sum()
        order = order[: 1 + int(np.searchsorted(shares.cumsum(), settings.get("top_p", 1.0)))]
        order = order[weights[order] >= settings.get("min_p", 0.0)]
        kept = weights[order] / weights[order].sum()
        return dict(zip(order.tolist(), kept.tolist(), strict=True))

    def outcomes(
        self, prompt: Sequence[int], depth: int, settings: Mapping[str, float]
    ) -> dict[tuple[int, ...], float]:
        """The probability of every possible text of `depth` tokens."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(depth):
            found = {
                (*text, token): before * prob
                for text, before in found.items()
                for token, prob in self.probs([*prompt, *text], settings).items()
            }
        return found
