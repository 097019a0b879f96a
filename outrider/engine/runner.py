"""Runs a step: from a batch of token lists to a forward of the model, and logits back.

Owns the model and the cache's tensors. Every call happens on the device thread. Knows nothing of
requests, of sampling, or of why a token is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.graphs import Graphs
from outrider.engine.model import LlamaModel, StepInput
from outrider.model_error import ModelError
from outrider_kernels.triton_ops.launch import send


class Runner:
    """A model with a paged cache of its own."""

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        graph_rows: int = 0,
    ) -> None:
        """graph_rows: of the largest step that `warm` captures, where steps can be; 0: none."""
        self.model = model
        self.cache = model.new_cache(num_blocks, block_size)
        self.graphs: Graphs | None = None
        """Steps that they compute give logits that are good until the next step."""
        if graph_rows and model.ops.frames is not None:
            self.graphs = Graphs(model, self.cache, graph_rows)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch; float32 [sum(num_logits), vocab_size], in batch order.

        On the device where operations choose tokens there, and then good until the next step; else
        on the CPU.
        """
        for item in batch.items:
            self._check(item)
        if not batch.items:
            return torch.empty(0, self.model.config.vocab_size)
        logits = self._replay(batch)
        if logits is None:
            logits = self.model.forward(self._step_input(batch), self.cache)
        return logits if self.model.ops.chooses_on_device else logits.cpu()

    def warm(self, name: str) -> None:
        """First steps, so that no request pays for them; `name` is the model's, for errors.

        Raises ModelError for weights that give no numbers, such as ones that hold NaN.
        """
        for start in self.model.ops.first_steps:
            blocks = range(start // self.cache.block_size + 1)
            if len(blocks) > self.cache.num_blocks or start >= self.model.config.max_model_len:
                continue
            logits = self.forward(Batch([BatchItem([0], start, list(blocks), 1)]))
            num_bad = int((~logits.isfinite()).sum())
            if num_bad:
                raise ModelError(
                    f"{name}: {num_bad} of {logits.numel()} logits of its first step are not "
                    "finite; its weights are damaged, or too large for this dtype"
                )
            if self.model.ops.warm_choosing is not None:
                self.model.ops.warm_choosing(logits)
        if self.graphs is not None:
            self.graphs.capture()

    def _replay(self, batch: Batch) -> torch.Tensor | None:
        """The logits of a captured step, None where there is none for this batch."""
        logits = None if self.graphs is None else self.graphs.replay(batch)
        if logits is None:
            for item in batch.items:
                self.cache.check_blocks(item.block_table)
        return logits

    def _check(self, item: BatchItem) -> None:
        """Raise ValueError for an item that would read or write outside its blocks."""
        num_slots = len(item.block_table) * self.cache.block_size
        if not item.token_ids or not 0 <= item.num_logits <= len(item.token_ids):
            raise ValueError(f"{item.num_logits} logits wanted of {len(item.token_ids)} tokens")
        if item.start < 0 or item.end > min(num_slots, self.model.config.max_model_len):
            raise ValueError(
                f"positions {item.start} to {item.end} exceed {num_slots} slots or the context"
            )
        if not 0 <= min(item.token_ids) <= max(item.token_ids) < self.model.config.vocab_size:
            raise ValueError("a token id outside the vocabulary")

    def _step_input(self, batch: Batch) -> StepInput:
        """All index arithmetic of the step, once for all layers.

        Most steps are a token of a few sequences: too little for whole arrays to pay.
        """
        config, block_size = self.model.config, self.cache.block_size
        items = batch.items
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for item in items:
            table, places = item.block_table, range(item.start, item.end)
            token_ids += item.token_ids
            positions += places
            slots += [table[at // block_size] * block_size + at % block_size for at in places]
            logit_rows += range(len(token_ids) - item.num_logits, len(token_ids))
        num_rows = max(len(token_ids), self.model.ops.min_rows)
        padding = [0] * (num_rows - len(token_ids))
        plan = self.model.ops.plan_attention(
            [len(item.token_ids) for item in items],
            [item.start for item in items],
            [item.block_table for item in items],
            block_size=block_size,
            num_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            num_rows=num_rows,
        )
        device = self.model.device
        joined = [*token_ids, *padding, *positions, *padding, *slots, *logit_rows]
        sizes = [num_rows, num_rows, len(slots), len(logit_rows)]
        numbers = send(torch.from_numpy(np.array(joined, dtype=np.int64)), device)
        ids, at, into, wanted = torch.split(numbers, sizes)
        return StepInput(ids, at, into, wanted, plan.to(device))
