"""Steps of few rows as captured graphs: one launch in place of hundreds, with equal results.

A graph is for a number of rows; a step takes the next larger one, and what it lacks is padding,
which writes nothing into the cache. Prefill, decoding and verification are one case here too: a
step is replayed if its rows, and the work of its attention, fit a graph.

While a step runs, the next one's block tables are laid out (table_layout.py); positions, slots and
attention's plan are made on the device, from where each sequence starts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

import torch

from outrider.engine.batch import Batch
from outrider.engine.capture import Capture, HostBuffer, reserved_bytes
from outrider.engine.kv_cache import KVCache
from outrider.engine.model import LlamaModel, StepInput
from outrider.engine.table_layout import Array, TableLayout
from outrider.model_error import ModelError
from outrider_kernels.triton_ops.frames import Frame

logger = logging.getLogger(__name__)


def row_sizes(most_rows: int) -> list[int]:
    """Rows of the graphs, ascending; steps of more than most_rows rows have none."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most_rows + 1, 32)]
    return [size for size in sizes if size <= most_rows]


class Graphs:
    """The captured steps of a model with its cache."""

    def __init__(self, model: LlamaModel, cache: KVCache, most_rows: int) -> None:
        """Take the memory; nothing is captured yet. most_rows >= 1.

        The model's operations must have `frames`.
        """
        config, device = model.config, model.device
        assert model.ops.frames is not None
        self._model, self._cache = model, cache
        self._sizes = row_sizes(most_rows)
        most_blocks = -(-config.max_model_len // cache.block_size)
        most_places = TableLayout.most_places(self._sizes[-1], most_blocks)
        self._frames = model.ops.frames(
            device,
            most_rows=self._sizes[-1],
            most_places=most_places,
            most_keys=config.max_model_len,
            cache_keys=cache.num_blocks * cache.block_size,
            num_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
        )
        self._logits = torch.empty(self._sizes[-1], config.vocab_size, device=device)
        size = self._frames.tables + most_places
        self._now, self._next = HostBuffer(size, device), HostBuffer(size, device)
        self.tables = TableLayout(self._tables_of(self._now), most_blocks, cache.check_blocks)
        """Counts how many were laid out in time."""
        self.num_replayed = 0
        """Steps."""
        self._captured: dict[int, tuple[Frame, Callable[[], None]]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """All graphs, the largest first, whose memory the others then share.

        Raises ModelError where the device's memory does not do.
        """
        before, capture = reserved_bytes(self._model.device), Capture(self._model.device)
        try:
            for size in reversed(self._sizes):
                frame = self._frames.frame(size)
                # Nothing but padding, for the steps of the capture itself.
                self._frames.fill(self._now.numbers, frame, [], [], [], [], [])
                self._now.send(self._frames.layout, self._frames.tables)
                self._now.wait()
                self._captured[size] = frame, capture.capture(self._work_of(frame))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"graph_rows: graphs for steps of up to {self._sizes[-1]} rows do not fit into the "
                f"device's memory beside weights and cache; lower it, or make the cache smaller: "
                f"{error}"
            ) from None
        taken = reserved_bytes(self._model.device) - before
        logger.info(
            "%d graphs captured, for steps of up to %d rows; they take %d MiB",
            len(self._sizes), self._sizes[-1], taken >> 20,
        )  # fmt: skip

    def replay(self, batch: Batch) -> torch.Tensor | None:
        """Logits [num_logits, vocab], good until the next step; None if no graph fits.

        Does not wait for the device. Raises ValueError for blocks that are none.
        """
        found = bisect_left(self._sizes, batch.num_tokens)
        if not self._captured or found == len(self._sizes):
            return None
        frame, run = self._captured[self._sizes[found]]
        try:
            fits = self._fill(batch, frame)
            if fits:
                self._now.send(self._frames.layout, self._frames.tables + self.tables.end)
                run()
                self.num_replayed += 1
        finally:
            # From here on the device is busy, and the next step's tables cost nothing.
            self._now, self._next = self._next, self._now
            self._now.wait()
            self.tables.prepare(self._tables_of(self._now))
        return self._logits[: batch.num_logits] if fits else None

    def _fill(self, batch: Batch, frame: Frame) -> bool:
        ids: list[int] = []
        wanted: list[int] = []
        for item in batch.items:
            ids += item.token_ids
            wanted += range(len(ids) - item.num_logits, len(ids))
        return self._frames.fill(
            self._now.numbers,
            frame,
            ids,
            wanted,
            [len(item.token_ids) for item in batch.items],
            [item.start for item in batch.items],
            [self._frames.tables + self.tables.place(item.block_table) for item in batch.items],
        )

    def _tables_of(self, buffer: HostBuffer) -> Array:
        return buffer.numbers[self._frames.tables :]

    def _work_of(self, frame: Frame) -> Callable[[], None]:
        step = StepInput(
            frame.token_ids, frame.positions, frame.slots, frame.logit_rows, frame.attention
        )
        logits = self._logits[: frame.num_rows]
        model, cache = self._model, self._cache  # work that held self would keep both alive

        def work() -> None:
            frame.spread()
            logits.copy_(model.forward(step, cache))

        return work
