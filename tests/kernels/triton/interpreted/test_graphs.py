"""Captured steps against steps that are not, bit for bit; on a CPU a capture is called again."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch

from bench.gpu_models import SMOLLM2_CONFIG, random_model
from outrider.engine.batch import Batch, BatchItem
from outrider.engine.capture import Capture, Work
from outrider.engine.graphs import Graphs, row_sizes
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.model_error import ModelError
from tests.kernels.triton.interpreted.readings import Readings

CONFIG = replace(
    SMOLLM2_CONFIG, vocab_size=50, hidden_size=40, intermediate_size=48, num_layers=2,
    num_heads=3, num_kv_heads=1, head_dim=64, max_model_len=1200,
)  # fmt: skip
NUM_BLOCKS, BLOCK = 90, 16
GRAPH_ROWS = 16


def make_model(dtype: str, kv_dtype: str = "auto") -> LlamaModel:
    """A tiny random one."""
    return random_model(CONFIG, dtype, torch.device("cpu"), "triton", kv_dtype)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    """In float32."""
    return make_model("float32")


def make_runner(model: LlamaModel, graph_rows: int) -> Runner:
    """With NaN wherever no token was written."""
    runner = Runner(model, NUM_BLOCKS, graph_rows=graph_rows)
    if runner.graphs is not None:
        runner.graphs.capture()
    for tensor in runner.cache.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    return runner


def graphs_of(runner: Runner) -> Graphs:
    """Those of a runner that has some."""
    assert runner.graphs is not None
    return runner.graphs


@dataclass
class Text:
    """A sequence as a scheduler has it: a table that grows, drafts that stand or fall."""

    blocks: list[int]
    num_computed: int = 0
    table: list[int] = field(default_factory=list)

    def item(self, rng: random.Random, num_new: int, num_logits: int) -> BatchItem:
        """The next tokens; takes the blocks that they need."""
        needed = -(-(self.num_computed + num_new) // BLOCK)
        while len(self.table) < needed:
            self.table.append(self.blocks.pop())
        ids = [rng.randrange(CONFIG.vocab_size) for _ in range(num_new)]
        return BatchItem(ids, self.num_computed, list(self.table), num_logits)

    def give_back(self) -> None:
        """Its blocks: it is computed again from the start, in others."""
        self.blocks[:0] = self.table
        self.table, self.num_computed = [], 0


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same numbers, and NaN in the same places."""
    return bool((torch.eq(one, other) | (one.isnan() & other.isnan())).all())


def check_same(runners: list[Runner], batch: Batch) -> None:
    """Logits without NaN, equal, and caches that are equal to the last slot."""
    found = [runner.forward(batch) for runner in runners]
    assert found[0].shape == found[1].shape == (batch.num_logits, CONFIG.vocab_size)
    assert torch.equal(found[0], found[1])
    caches = [runner.cache.tensors for runner in runners]
    assert all(equal_bits(*pair) for pair in zip(*caches, strict=True))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "num_steps"),
    [
        pytest.param("float32", "auto", 4, id="float32"),
        pytest.param("float32", "auto", 40, id="float32 long", marks=pytest.mark.slow),
        pytest.param("bfloat16", "auto", 20, id="bfloat16", marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", 20, id="int8 cache", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_replayed_steps_give_the_bits_of_others(dtype: str, kv_dtype: str, num_steps: int) -> None:
    """Chunks, single tokens and drafts in any company; padding, preemption and poisoned caches."""
    model, rng = make_model(dtype, kv_dtype), random.Random(0)
    runners = [make_runner(model, graph_rows) for graph_rows in (GRAPH_ROWS, 0)]
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    texts = [Text(blocks) for _ in range(3)]
    for _ in range(num_steps):
        items = []
        for text in rng.sample(texts, rng.randint(1, len(texts))):
            if text.num_computed and rng.random() < 0.15:
                text.give_back()
            num_new = rng.choice([1, 1, 2, 5, 9])
            item = text.item(rng, num_new, rng.choice([num_new, num_new, 1, 0]))
            items.append(item)
            text.num_computed += rng.randint(1, num_new)  # the other ones fell
        check_same(runners, Batch(items))
    graphs = graphs_of(runners[0])
    assert 0 < graphs.num_replayed <= num_steps
    assert 0 < graphs.tables.num_known < graphs.tables.num_placed


def test_contexts_of_several_splits_are_replayed(model: LlamaModel) -> None:
    """Partial results and their merge in memory that is larger than a step needs."""
    rng = random.Random(0)
    runners = [make_runner(model, graph_rows) for graph_rows in (GRAPH_ROWS, 0)]
    texts = [Text(list(range(45, 90)), 509), Text(list(range(45)), 30)]
    for tensors in zip(*(each.cache.tensors for each in runners), strict=True):
        tensors[0].normal_(generator=torch.Generator().manual_seed(0))
        tensors[1].copy_(tensors[0])
    for _ in range(2):
        check_same(runners, Batch([text.item(rng, 5, 5) for text in texts]))
        for text in texts:
            text.num_computed += 3
    assert graphs_of(runners[0]).num_replayed == 2


def test_steps_that_fit_no_graph_are_computed_as_before(model: LlamaModel) -> None:
    """More rows than the largest graph; and nothing that they leave behind confuses the next."""
    rng = random.Random(0)
    runners = [make_runner(model, graph_rows) for graph_rows in (8, 0)]
    texts = [Text(list(range(40))), Text(list(range(40, 80)))]
    for num_new, replayed in ((2, 1), (5, 1), (1, 2)):
        check_same(runners, Batch([text.item(rng, num_new, num_new) for text in texts]))
        for text in texts:
            text.num_computed += num_new
        assert graphs_of(runners[0]).num_replayed == replayed


def test_bad_items_are_refused_and_forgotten(model: LlamaModel) -> None:
    """By the same words as without graphs, and the steps after them are right."""
    runners = [make_runner(model, graph_rows) for graph_rows in (8, 0)]
    good = BatchItem([5], 0, [3], 1)
    for bad in ([NUM_BLOCKS], [3, -1]):
        for runner in runners:
            with pytest.raises(ValueError, match="a block outside the cache"):
                runner.forward(Batch([good, BatchItem([5], 0, bad, 1)]))
        check_same(runners, Batch([good]))
    assert graphs_of(runners[0]).num_replayed == 2


def test_nothing_of_a_runner_outlives_it(model: LlamaModel) -> None:
    """No cycle keeps its cache, or a device's memory would be taken until Python looks for one."""
    runner = make_runner(model, 8)
    runner.forward(Batch([BatchItem([5], 0, [3], 1)]))
    cache, graphs = weakref.ref(runner.cache), weakref.ref(graphs_of(runner))
    del runner
    assert cache() is None and graphs() is None


def test_sizes_of_graphs_leave_little_to_padding() -> None:
    """Less than half of a graph's rows are padding, and from 64 rows on less than a quarter."""
    assert row_sizes(1) == [1]
    assert row_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    sizes = row_sizes(256)
    assert sizes[-6:] == [112, 128, 160, 192, 224, 256]
    for rows in range(1, 257):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < size / (4 if rows > 64 else 2)


@pytest.mark.parametrize("graph_rows", [0, 8])
def test_no_step_waits_for_what_the_device_computes(model: LlamaModel, graph_rows: int) -> None:
    """From the batch to its logits nothing is read back."""
    runner = make_runner(model, graph_rows)
    batch = Batch([BatchItem([1, 2, 3], 0, [3], 1), BatchItem([7], 0, [4], 1)])
    with Readings() as readings:
        logits = runner.forward(batch)
        assert readings.names == []
        assert logits[logits.isfinite()].sum().item() != 0.0  # what would be noticed
    assert readings.names == ["__getitem__", "item"]


def test_too_little_memory_names_the_setting(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs come after the cache was sized, so it is there that a device may run out."""

    def run_out(self: Capture, work: Work) -> Work:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(Capture, "capture", run_out)
    runner = Runner(model, NUM_BLOCKS, graph_rows=GRAPH_ROWS)
    with pytest.raises(ModelError, match="graph_rows: .* 16 rows .* tried to allocate 2 GiB"):
        graphs_of(runner).capture()
