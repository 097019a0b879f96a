"""A step as one call: the model that the operations make one by one, and the same bits anyhow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import model as model_module
from outrider.engine.batch import Batch, BatchItem
from outrider.engine.config import ModelConfig
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.engine.weights import load_weights
from outrider_kernels.ops import Ops
from tests.support.implementations import IMPLEMENTATIONS, ops_of
from tests.support.tiny_models import make_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "heads of 32": {"hidden_size": 72, "heads": 6, "kv_heads": 2, "head_dim": 32},
    "heads of 64, biases of heads, a table beside the head": {
        "arch": "qwen2", "hidden_size": 192, "heads": 3, "kv_heads": 1, "tied_head": False,
        "vocab_size": 401,
    },
    "heads of 80, biases, gates that end within a strip": {
        "hidden_size": 66, "heads": 3, "kv_heads": 3, "head_dim": 80, "attention_bias": True,
        "mlp_bias": True, "intermediate_size": 84,
    },
    "heads of 128, norms of heads": {
        "arch": "qwen3", "hidden_size": 100, "heads": 4, "kv_heads": 1, "head_dim": 128,
    },
}  # fmt: skip
PRECISIONS = {
    "float32": (torch.float32, None, "auto", 1e-4),
    "bfloat16": (torch.bfloat16, None, "auto", 2e-2),
    "int8": (torch.float32, "int8", "auto", 2e-2),
    "int8 of bfloat16": (torch.bfloat16, "int8", "auto", 6e-2),
    "int4": (torch.float32, "int4", "auto", 2e-2),
    "int4 of bfloat16": (torch.bfloat16, "int4", "auto", 6e-2),
    "float32, an int8 cache": (torch.float32, None, "int8", 2e-2),
}
"""Of weights; how they are rounded; of the cache; how far logits may be off, by their size."""
TEXTS = [(list(range(3, 280)), [9, 2, 30, 4, 31, 7, 0, 11, 5, 6, 8, 1, 3, 20, 22, 21, 25, 26])]
TEXTS += [([5, 9, 200, 31, 77] * 3, [13, 14])]
each_isa = pytest.mark.parametrize("isa", IMPLEMENTATIONS[1:])
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each shape."""
    return {
        name: make_tiny_model(tmp_path_factory.mktemp("tiny"), **SHAPES[name]) for name in SHAPES
    }


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_runner(
    monkeypatch: pytest.MonkeyPatch, folder: Path, precision: str, implementation: str
) -> Runner:
    """The model with these operations, and a cache that holds NaN; in int8, scales that are."""
    ops = ops_of(implementation, rounding=PRECISIONS[precision][1])
    return runner_with(monkeypatch, folder, precision, ops)


def runner_with(monkeypatch: pytest.MonkeyPatch, folder: Path, precision: str, ops: Ops) -> Runner:
    """The same with any operations."""
    dtype, rounding, kv_dtype, _ = PRECISIONS[precision]
    monkeypatch.setattr(model_module, "select_ops", lambda *_, **__: ops)
    tensors = load_weights(folder, dtype, torch.device("cpu"))
    config = ModelConfig.load(folder)
    model = LlamaModel(
        config, tensors, weights_fingerprint="", rounding=rounding, kv_dtype=kv_dtype
    )
    runner = Runner(model, 40)
    for tensor in runner.cache.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    return runner


def forward_in_chunks(runner: Runner, size: int) -> list[torch.Tensor]:
    """Logits of every position of each text, so many tokens of it at a time, all side by side."""
    rows: list[list[torch.Tensor]] = [[] for _ in TEXTS]
    for begin in range(0, max(len(text) for text, _ in TEXTS), size):
        shares = [(i, t[begin : begin + size], table) for i, (t, table) in enumerate(TEXTS)]
        items = [(i, BatchItem(new, begin, table, len(new))) for i, new, table in shares if new]
        logits = runner.forward(Batch([item for _, item in items]))
        for (i, _), part in zip(
            items, logits.split([item.num_logits for _, item in items]), strict=True
        ):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


@each_isa
@each_precision
@each_shape
def test_a_step_is_what_its_operations_make(
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, Path],
    shape: str,
    precision: str,
    isa: str,
) -> None:
    """Logits of plain torch, operation by operation, but for rounding in between."""
    plain = make_runner(monkeypatch, folders[shape], precision, "torch")
    compiled = make_runner(monkeypatch, folders[shape], precision, isa)
    for expected, found in zip(
        forward_in_chunks(plain, 300), forward_in_chunks(compiled, 300), strict=True
    ):
        error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < PRECISIONS[precision][-1]


@each_isa
@each_precision
@each_shape
def test_rows_do_not_feel_company_chunks_or_threads(
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, Path],
    shape: str,
    precision: str,
    isa: str,
) -> None:
    """The same bits in small chunks and whole, alone and beside others, with any threads."""
    runner = make_runner(monkeypatch, folders[shape], precision, isa)
    expected = forward_in_chunks(runner, 300)
    assert all(logits.isfinite().all() for logits in expected)
    for size, num_threads in [(6, 2), (37, 1), (300, 2), (130, 3)]:  # the last of 6 is one row
        torch.set_num_threads(num_threads)
        found = forward_in_chunks(runner, size)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each_precision
@each_shape
def test_bits_are_the_same_with_registers_of_any_width(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], shape: str, precision: str
) -> None:
    """avx2, avx512 and avx512vnni, of those that the machine has; generic code rounds twice."""
    found = []
    for isa in ("avx2", "avx512", "avx512vnni"):
        runner = make_runner(monkeypatch, folders[shape], precision, isa)
        found.append(torch.cat(forward_in_chunks(runner, 20)))
        assert torch.equal(found[0], found[-1])


@each_isa
@each_shape
@pytest.mark.parametrize("head", [None, "int8"], ids=str)
def test_a_head_may_be_of_another_type_than_the_layers(
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, Path],
    shape: str,
    head: str | None,
    isa: str,
) -> None:
    """Float beside int8, and the other way round: near all of float, the same bits in chunks."""
    expected = make_runner(monkeypatch, folders[shape], "float32", isa)
    layers = ops_of(isa, rounding=None if head else "int8")
    ops = replace(layers, pack_table=ops_of(isa, rounding=head).pack_table)
    runner = runner_with(monkeypatch, folders[shape], "float32", ops)
    found = torch.cat(forward_in_chunks(runner, 300))
    plain = torch.cat(forward_in_chunks(expected, 300))
    error = (found - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert 0 < error < 6e-2
    assert torch.equal(found, torch.cat(forward_in_chunks(runner, 6)))


def test_a_head_in_int4_is_no_table(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    """Its columns cannot be looked up: refused when the model is made, not read as bytes."""
    nibbles = ops_of("generic", rounding="int4")
    ops = replace(nibbles, pack_table=nibbles.pack)
    with pytest.raises(ValueError, match="int4"):
        runner_with(monkeypatch, folders["heads of 32"], "int4", ops)


@each_isa
def test_waiting_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], isa: str
) -> None:
    """Asleep at once, or awake for long: the same logits."""
    runner = make_runner(monkeypatch, folders["heads of 32"], "int8", isa)
    library = ops_of(isa).decoder.args[0]  # type: ignore[union-attr]
    torch.set_num_threads(2)
    found = []
    for spin_us in (0, 1000, 50):
        library.set_spin(spin_us)
        found.append(torch.cat(forward_in_chunks(runner, 20)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="-1 us"):
        library.set_spin(-1)


def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    """Weights, caches and steps of another shape or dtype: an error, not a wild pointer."""
    runner = make_runner(monkeypatch, folders["heads of 32"], "float32", "generic")
    decoder = runner.model._decoder
    assert decoder is not None
    keys = runner.cache.keys
    for wrong in (
        [keys[0]],
        [keys[0], keys[1].bfloat16()],
        [keys[0], keys[1][:, :, :1]],
        [keys[0].transpose(0, 1), keys[1].transpose(0, 1)],
        [key.double() for key in keys],
    ):
        with pytest.raises(ValueError, match="cache"):
            decoder.cache(wrong, runner.cache.values)
    cache = decoder.cache(keys, runner.cache.values)
    step = runner._step_input(Batch([BatchItem([1, 2], 0, [0], 1)]))
    numbers = [step.token_ids, step.positions, step.slots, step.logit_rows]
    for i in range(4):
        for spoil in (torch.Tensor.int, lambda tensor: tensor[:, None]):
            spoilt = [spoil(tensor) if i == j else tensor for j, tensor in enumerate(numbers)]
            with pytest.raises(ValueError, match="int64"):
                decoder.step(*spoilt, step.attention, cache)
    for i in range(3):
        spoilt = [tensor[:1] if i == j else tensor for j, tensor in enumerate(numbers)]
        with pytest.raises(ValueError, match="do not fit"):
            decoder.step(*spoilt, step.attention, cache)
    assert decoder.step(*numbers, step.attention, cache).shape == (1, 384)
