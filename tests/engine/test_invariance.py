"""The promise under everything else: a token's logits have the same bits in any company.

Each test computes a text once, alone and one token at a time, and then again in some other way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import choose_row_plan, is_row_invariant, numerics_id
from outrider.engine.runner import Runner
from outrider_kernels.linear import RowPlan
from tests.support.kernels import are_interpreted, each_kernels
from tests.support.sixteen_levels import give_sixteen_levels
from tests.support.tiny_models import make_tiny_model

NUM_BLOCKS = 96
NUM_MIXES = 1 if are_interpreted() else 6
LONGEST = 20 if are_interpreted() else 150
"""Tokens of a text."""
CACHES_IN_8_BITS = (
    [("bfloat16", "int8"), ("int8", "e4m3")]
    if are_interpreted()
    else [("float32", "int8"), ("int8", "int8")]
)
"""dtype and kv_dtype."""


class Text:
    """A random text with blocks of its own and the logits of every position, computed plainly."""

    def __init__(self, runner: Runner, rng: random.Random, length: int, blocks: list[int]) -> None:
        vocab_size = runner.model.config.vocab_size
        self.token_ids = [rng.randrange(vocab_size) for _ in range(length)]
        self.blocks = [blocks.pop() for _ in range(length // 16 + 2)]
        self.num_computed = 0
        rows = []
        for position, token in enumerate(self.token_ids):
            rows.append(runner.forward(Batch([BatchItem([token], position, self.blocks, 1)])))
        self.logits = torch.cat(rows)


def poison(runner: Runner) -> None:
    """NaN in every slot: whoever reads one that was not written shows it."""
    for tensor in runner.cache.tensors:
        # In int8 all bits set: a scale of such bytes is NaN.
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


@pytest.fixture(scope="module", params=each_kernels())
def kernels(request: pytest.FixtureRequest) -> str:
    """Each test once with compiled operations, where they can be had, and once with plain torch."""
    return str(request.param)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Runner:
    """A tiny model with odd sizes and three query heads a group."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("tiny"), hidden_size=72, heads=9, kv_heads=3, head_dim=16
    )
    return Runner(LlamaModel.load(folder, kernels=kernels), NUM_BLOCKS)


@pytest.fixture(scope="module")
def qwen3_runner(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Runner:
    """The same with norms of queries and keys, and heads of a width of their own."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("qwen3"), arch="qwen3", hidden_size=72, heads=9, kv_heads=3,
        head_dim=40,
    )  # fmt: skip
    return Runner(LlamaModel.load(folder, kernels=kernels), NUM_BLOCKS)


@pytest.fixture(scope="module")
def bfloat16_runner(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Runner:
    """The same in bfloat16, with biases."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("bfloat16"), hidden_size=72, heads=9, kv_heads=3, head_dim=16,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return Runner(LlamaModel.load(folder, "bfloat16", kernels=kernels), NUM_BLOCKS)


@pytest.fixture(scope="module", params=["int8", "int4", "auto"])
def rounded_runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: str
) -> Runner:
    """The same in int8, int4 or some of both, with a table that is not the head."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp(request.param), hidden_size=72, heads=9, kv_heads=3, head_dim=16,
        attention_bias=True, mlp_bias=True, tied_head=False,
    )  # fmt: skip
    give_sixteen_levels(folder, "o_proj", "gate_proj", "up_proj")
    model = LlamaModel.load(folder, request.param, kernels=kernels)
    assert model.precision == {"auto": "int8+int4"}.get(request.param, request.param)
    return Runner(model, NUM_BLOCKS)


@pytest.fixture(scope="module", params=CACHES_IN_8_BITS, ids="-".join)
def small_cache_runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: str
) -> Runner:
    """The same with keys and values in 8 bits, of heads that are no whole groups."""
    dtype, kv_dtype = request.param
    folder = make_tiny_model(
        tmp_path_factory.mktemp("small-cache"), hidden_size=72, heads=9, kv_heads=3, head_dim=40
    )
    model = LlamaModel.load(folder, dtype, kernels=kernels, kv_dtype=kv_dtype)
    return Runner(model, NUM_BLOCKS)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_random_mix(runner: Runner, seed: int, lengths: list[int]) -> None:
    """Recompute texts in random chunks, company and block tables, with random drafts after them."""
    rng = random.Random(seed)
    vocab_size = runner.model.config.vocab_size
    torch.set_num_threads(1)
    poison(runner)
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    texts = [Text(runner, rng, length, blocks) for length in lengths]

    poison(runner)
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    for text in texts:
        text.blocks = [blocks.pop() for _ in range(len(text.token_ids) // 16 + 2)]
    while unfinished := [t for t in texts if t.num_computed < len(t.token_ids)]:
        torch.set_num_threads(rng.choice([1, 2]))
        members = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        items, expected = [], []
        for text in members:
            left = len(text.token_ids) - text.num_computed
            num_new = min(left, rng.choice([1, 1, 2, 5, 30, 130]))
            drafts = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 0, 1, 4, 8]))]
            begin = text.num_computed
            new = text.token_ids[begin : begin + num_new]
            items.append(
                BatchItem(new + drafts, begin, text.blocks, rng.choice([num_new, 1]) + len(drafts))
            )
            num_kept = items[-1].num_logits - len(drafts)
            expected.append((text.logits[begin + num_new - num_kept : begin + num_new], drafts))
            text.num_computed += num_new
        logits = runner.forward(Batch(items))
        assert logits.shape[0] == sum(item.num_logits for item in items)
        row = 0
        for rows, drafts in expected:
            assert torch.equal(logits[row : row + len(rows)], rows)
            row += len(rows) + len(drafts)


def random_lengths(rng: random.Random) -> list[int]:
    """Of the texts of a mix."""
    most = 2 if are_interpreted() else 5
    return [rng.randint(1, LONGEST) for _ in range(rng.randint(1, most))]


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("seed", range(NUM_MIXES))
def test_any_mix_gives_the_same_bits(runner: Runner, seed: int) -> None:
    """Company, chunks, drafts, block tables, threads and poisoned slots leave every bit alone."""
    rng = random.Random(seed)
    run_random_mix(runner, seed, random_lengths(rng))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("seed", range(min(3, NUM_MIXES)))
def test_any_mix_gives_the_same_bits_with_head_norms(qwen3_runner: Runner, seed: int) -> None:
    """The same with Qwen3's norms of queries and keys."""
    rng = random.Random(seed)
    run_random_mix(qwen3_runner, seed, random_lengths(rng))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("seed", range(NUM_MIXES))
def test_any_mix_gives_the_same_bits_in_bfloat16(bfloat16_runner: Runner, seed: int) -> None:
    """The same in bfloat16: sums are float32's, and each result is rounded once."""
    rng = random.Random(seed)
    run_random_mix(bfloat16_runner, seed, random_lengths(rng))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("seed", range(NUM_MIXES))
def test_any_mix_gives_the_same_bits_when_rounded(rounded_runner: Runner, seed: int) -> None:
    """The same in int8, int4 and both: rows are rounded by their own values alone."""
    rng = random.Random(seed)
    run_random_mix(rounded_runner, seed, random_lengths(rng))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("seed", range(min(4, NUM_MIXES)))
def test_any_mix_gives_the_same_bits_with_a_cache_in_8_bits(
    small_cache_runner: Runner, seed: int
) -> None:
    """The same with keys and values in 8 bits: each is rounded by its own values alone."""
    rng = random.Random(seed)
    run_random_mix(small_cache_runner, seed, random_lengths(rng))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.timeout(120)
def test_any_mix_gives_the_same_bits_on_the_real_model_with_an_int8_cache(
    smollm2_folder: Path,
) -> None:
    """On SmolLM2, weights in int8 as well."""
    model = LlamaModel.load(smollm2_folder, "int8", kv_dtype="int8")
    run_random_mix(Runner(model, NUM_BLOCKS), 1, [37, 6, 15])


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_any_mix_gives_the_same_bits_on_the_real_model(
    smollm2_folder: Path, dtype: str, kernels: str
) -> None:
    """The same on SmolLM2, whose products are large enough for every kernel of the library."""
    runner = Runner(LlamaModel.load(smollm2_folder, dtype, kernels=kernels), NUM_BLOCKS)
    # Plain torch widens every rounded weight in each step, and each token of a text is one.
    widens = kernels == "torch" and dtype in ("int8", "int4")
    run_random_mix(runner, 1, [18, 3] if widens else [37, 6, 15])


@pytest.mark.slow
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.timeout(3600)  # plain torch widens every rounded weight in each of 1,200 steps
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_long_mixes_give_the_same_bits_on_the_real_model(
    smollm2_folder: Path, dtype: str, kernels: str
) -> None:
    """Longer texts over several chunks of keys."""
    runner = Runner(LlamaModel.load(smollm2_folder, dtype, kernels=kernels), NUM_BLOCKS)
    for seed in range(2):
        run_random_mix(runner, seed, [300, 140, 20, 131, 1])


def test_drafts_leave_no_trace(runner: Runner) -> None:
    """Wrong drafts are overwritten: the next step sees only the confirmed tokens."""
    poison(runner)
    table = list(range(4))
    text = [5, 9, 200, 31, 77]
    plain = runner.forward(Batch([BatchItem(text, 0, table, 5)]))
    runner.forward(Batch([BatchItem([*text[:2], 1, 2, 3, 4, 5, 6, 7, 8], 0, table, 0)]))
    again = runner.forward(Batch([BatchItem(text[2:], 2, table, 3)]))
    assert torch.equal(again, plain[2:])


def test_a_shared_prefix_gives_the_same_bits(runner: Runner) -> None:
    """Two sequences may read the same blocks of a prefix."""
    poison(runner)
    prefix = list(range(40, 72))
    runner.forward(Batch([BatchItem(prefix, 0, [3, 8], 0)]))
    both = runner.forward(
        Batch([BatchItem([1, 2], 32, [3, 8, 5], 2), BatchItem([1, 3], 32, [3, 8, 6], 2)])
    )
    alone = runner.forward(Batch([BatchItem([*prefix, 1, 3], 0, [0, 1, 2], 2)]))
    assert torch.equal(both[2:], alone)
    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (BatchItem([], 0, [0], 0), "0 logits wanted of 0 tokens"),
        (BatchItem([1], 0, [0], 2), "2 logits wanted of 1 tokens"),
        (BatchItem([1], 0, [0], -1), "-1 logits wanted of 1 tokens"),
        (BatchItem([1] * 17, 0, [0], 1), "positions 0 to 17 exceed 16 slots"),
        (BatchItem([1], 0, [], 1), "positions 0 to 1 exceed 0 slots"),
        (BatchItem([1], -1, [0], 1), "positions -1 to 0 exceed"),
        (BatchItem([1], 512, list(range(40)), 1), "positions 512 to 513 exceed .* the context"),
        (BatchItem([384], 0, [0], 1), "a token id outside the vocabulary"),
        (BatchItem([-1], 0, [0], 1), "a token id outside the vocabulary"),
        (BatchItem([1], 0, [NUM_BLOCKS], 1), "a block outside the cache"),
        (BatchItem([1], 0, [-1], 1), "a block outside the cache"),
    ],
)
def test_items_that_do_not_fit_are_refused(runner: Runner, item: BatchItem, reason: str) -> None:
    """Nothing is read or written outside the item's blocks, the vocabulary or the context."""
    with pytest.raises(ValueError, match=reason):
        runner.forward(Batch([item]))


def test_an_empty_batch_has_no_logits(runner: Runner) -> None:
    """No items, or none whose logits are wanted: no rows."""
    vocab_size = runner.model.config.vocab_size
    assert runner.forward(Batch()).shape == (0, vocab_size)
    assert runner.forward(Batch([BatchItem([1], 0, [0], 0)])).shape == (0, vocab_size)


def test_the_probe_sees_products_that_feel_their_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose result depends on the number of rows is noticed, and tiles are used."""

    def fair(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Each row by itself: what a real library does with small products differs by processor.
        return torch.stack([weight.t() @ row for row in x])

    def moody(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fair(x, weight) + 1e-6 * x.shape[0]

    weight = torch.randn(16, 20, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "mm", fair)
    assert choose_row_plan([weight]) == (RowPlan(), True)
    monkeypatch.setattr(torch, "mm", moody)
    assert not is_row_invariant(weight, RowPlan())
    assert not is_row_invariant(weight.bfloat16(), RowPlan())
    assert choose_row_plan([weight]) == (RowPlan(tile_rows=32), True)


def test_numerics_id_names_weights_and_settings(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal for the same weights and settings, different when one of them is."""
    name = numerics_id(runner.model)
    assert name == numerics_id(runner.model)
    other = make_tiny_model(tmp_path, seed=1)
    assert name != numerics_id(LlamaModel.load(other))
    narrow = LlamaModel.load(other, "bfloat16", kernels="torch")
    assert numerics_id(narrow).startswith("bfloat16-cpu-torch-")
    for dtype in ("int8", "int4"):
        rounded = LlamaModel.load(other, dtype, kernels="torch")
        assert numerics_id(rounded).startswith(f"{dtype}-cpu-torch-")
    compiled = LlamaModel.load(other, "bfloat16")
    assert numerics_id(compiled).startswith(f"bfloat16-{compiled.ops.name}-")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert name != numerics_id(runner.model)
