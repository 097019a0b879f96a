"""Precisions other than float32, and devices other than the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import model as model_module
from outrider.engine.batch import Batch, BatchItem
from outrider.engine.config import ModelConfig, ModelError
from outrider.engine.device import parse_device, parse_dtype
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import numerics_id
from outrider.engine.precision import choose_precision
from outrider.engine.runner import Runner
from outrider.engine.weights import load_weights
from outrider_kernels.linear import RowPlan
from outrider_kernels.ops import select_ops
from tests.support.kernels import are_interpreted, each_kernels
from tests.support.sixteen_levels import give_sixteen_levels
from tests.support.tiny_models import make_tiny_model

TOKEN_IDS = list(range(3, 27 if are_interpreted() else 203))
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2-untied": {"arch": "qwen2", "tied_head": False},
    "qwen3": {"arch": "qwen3", "head_dim": 24},
}


def logits(model: LlamaModel, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position."""
    num_blocks = len(token_ids) // 16 + 1
    item = BatchItem(token_ids, 0, list(range(num_blocks)), len(token_ids))
    return Runner(model, num_blocks).forward(Batch([item]))


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits of every position, computed wholly in dtype."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def assert_as_close_as_transformers(folder: Path, *texts: list[int], kernels: str) -> None:
    """Rounding to bfloat16 moves our logits no further than it moves transformers' own."""
    model, ours, theirs = LlamaModel.load(folder, "bfloat16", kernels=kernels), 0.0, 0.0
    for token_ids in texts:
        exact = reference_logits(folder, token_ids, torch.float32)
        rounded = reference_logits(folder, token_ids, torch.bfloat16)
        theirs += float((rounded - exact).square().mean())
        ours += float((logits(model, token_ids) - exact).square().mean())
    assert ours <= 1.1 * theirs


@pytest.mark.timeout(120)  # the first imports transformers
@pytest.mark.parametrize("kernels", each_kernels())
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_exact_as_transformers(tmp_path: Path, shape: str, kernels: str) -> None:
    """Mean square distance from float32, on every shape."""
    folder = make_tiny_model(tmp_path, **SHAPES[shape])
    assert_as_close_as_transformers(folder, TOKEN_IDS, kernels=kernels)


@pytest.mark.timeout(120)  # the first imports transformers
@pytest.mark.parametrize("kernels", each_kernels())
def test_bfloat16_is_as_exact_as_transformers_on_the_real_model(
    smollm2_folder: Path, kernels: str
) -> None:
    """The same on SmolLM2, over several texts: how far rounding takes a single one is chance."""
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    texts = [prompt * 3, list(range(300, 360)), list(range(1000, 1060)), list(range(40, 4000, 60))]
    assert_as_close_as_transformers(smollm2_folder, *texts, kernels=kernels)


def test_bfloat16_takes_half_the_memory(tmp_path: Path) -> None:
    """Weights and cache are half as large; vectors and logits stay float32."""
    folder = make_tiny_model(tmp_path, attention_bias=True)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        runner = Runner(LlamaModel.load(folder, dtype), 8)
        layer = runner.model._layers[0]
        sizes[dtype] = [layer.qkv.weight.nbytes, layer.down.weight.nbytes,
                        runner.model._head.weight.nbytes, runner.cache.keys[0].nbytes]  # fmt: skip
        assert layer.mlp_norm.dtype == layer.qkv.bias.dtype == torch.float32
        assert runner.forward(Batch([BatchItem([1], 0, [0], 1)])).dtype == torch.float32
    assert [2 * size for size in sizes["bfloat16"]] == sizes["float32"]


@pytest.mark.parametrize(("dtype", "num_bytes"), [("int8", 17 / 16), ("int4", 5 / 8)])
@pytest.mark.parametrize("kernels", each_kernels())
@pytest.mark.parametrize("tied_head", [True, False])
def test_rounded_weights_take_a_byte_or_half_of_one(
    tmp_path: Path, kernels: str, tied_head: bool, dtype: str, num_bytes: float
) -> None:
    """And some more for scales; the head takes a byte, the cache is bfloat16, vectors float32."""
    folder = make_tiny_model(tmp_path, attention_bias=True, tied_head=tied_head)
    runner = Runner(LlamaModel.load(folder, dtype, kernels=kernels), 8)
    model = runner.model
    layer = model._layers[0]
    config, width = model.config, model.config.hidden_size
    inner = config.intermediate_size
    sizes = [layer.gate_up.weight.nbytes, layer.down.weight.nbytes, model._head.weight.nbytes]
    head = config.vocab_size * width * 17 / 16
    assert sizes == [2 * inner * width * num_bytes, inner * width * num_bytes, head]
    assert runner.cache.keys[0].dtype == torch.bfloat16
    assert layer.mlp_norm.dtype == layer.qkv.bias.dtype == torch.float32
    assert runner.forward(Batch([BatchItem([1], 0, [0], 1)])).dtype == torch.float32
    assert model.precision == dtype


@pytest.mark.timeout(120)  # plain torch widens every rounded weight in each step
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("kernels", each_kernels())
def test_rounding_keeps_the_distribution_of_the_real_model(
    smollm2_folder: Path, kernels: str, dtype: str
) -> None:
    """Of the next token, within 0.02 nats of float32's on average, on plain text and on none."""
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    exact = LlamaModel.load(smollm2_folder)
    rounded = LlamaModel.load(smollm2_folder, dtype, kernels=kernels)
    for text in (prompt * 3, list(range(300, 360)), list(range(40, 4000, 60))):
        expected = torch.log_softmax(logits(exact, text), -1)
        found = torch.log_softmax(logits(rounded, text), -1)
        assert (expected.exp() * (expected - found)).sum(-1).mean() < 0.02


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [
        ("auto", "cpu", "int8+int4"),
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("float32", "cpu", "float32"),
        ("int8", "cuda:0", "int8"),
    ],
)
def test_auto_follows_the_device(dtype: str, device: str, precision: str) -> None:
    """What is said is kept; what is left open is 8 or 4 bits on a CPU and bfloat16 on a GPU."""
    assert choose_precision(dtype, device) == precision


@pytest.mark.parametrize("kernels", each_kernels())
@pytest.mark.parametrize(("endings", "precision"), [((), "int8"), (("",), "int4")])
def test_auto_is_the_precision_that_it_became(
    tmp_path: Path, endings: tuple[str, ...], precision: str, kernels: str
) -> None:
    """A model never calls itself "auto": precision and numerics are those of int8 if no matrix
    keeps its weights in 4 bits, and of int4 if each does."""
    folder = give_sixteen_levels(make_tiny_model(tmp_path), *endings)
    auto = LlamaModel.load(folder, "auto", kernels=kernels)
    named = LlamaModel.load(folder, precision, kernels=kernels)
    assert auto.precision == named.precision == precision
    assert auto.weight_bytes == named.weight_bytes
    assert numerics_id(auto) == numerics_id(named)
    assert torch.equal(logits(auto, TOKEN_IDS), logits(named, TOKEN_IDS))


@pytest.mark.parametrize("kernels", each_kernels())
def test_auto_may_keep_some_matrices_in_4_bits(
    tmp_path: Path, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A name of its own, in numerics as well, and weights that are nearer than int4's."""
    folder = give_sixteen_levels(make_tiny_model(tmp_path), "down_proj", "o_proj", "q_proj")
    caplog.set_level("INFO")
    found = {name: LlamaModel.load(folder, name, kernels=kernels) for name in ("int8", "int4")}
    assert "matrices lose nothing" not in caplog.text
    found["auto"] = auto = LlamaModel.load(folder, "auto", kernels=kernels)
    assert "4 of 8 matrices lose nothing in 4 bits" in caplog.text  # q, k and v are one matrix
    assert auto.precision == "int8+int4"
    assert numerics_id(auto).startswith(f"int8+int4-{auto.ops.name}-")
    assert len({numerics_id(model) for model in found.values()}) == 3
    assert found["int4"].weight_bytes < auto.weight_bytes < found["int8"].weight_bytes
    expected = logits(LlamaModel.load(folder, "bfloat16"), TOKEN_IDS)
    errors = {
        name: float((logits(model, TOKEN_IDS) - expected).square().mean())
        for name, model in found.items()
    }
    assert errors["auto"] < errors["int4"] / 4


def test_auto_keeps_the_real_model_in_4_bits(smollm2_folder: Path) -> None:
    """It comes from a file that has it so: every weight of every matrix is as in the file."""
    auto = LlamaModel.load(smollm2_folder, "auto")
    assert auto.precision == "int4"
    assert numerics_id(auto) == numerics_id(LlamaModel.load(smollm2_folder, "int4"))


def test_unknown_precisions_are_refused_by_name(tmp_path: Path) -> None:
    """The error says which there are."""
    with pytest.raises(ModelError, match=r"float32, bfloat16, int8 or int4, got 'int3'"):
        LlamaModel.load(make_tiny_model(tmp_path), "int3")
    assert parse_dtype("bfloat16") == torch.bfloat16


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_unknown_devices_are_refused_by_name(name: str) -> None:
    """Only cpu and cuda:N."""
    with pytest.raises(ModelError, match="device must be cpu or cuda:N"):
        parse_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA in torch, no device, too few devices: each says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError, match="cuda:0 .*built without CUDA.*--device cpu"):
        parse_device("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ModelError, match="no CUDA device or driver"):
        parse_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="cuda:2 .* there are 2"):
        parse_device("cuda:2")
    assert parse_device("cuda") == torch.device("cuda", 0)
    assert parse_device("cuda:1") == torch.device("cuda", 1)


def test_kernels_start_on_the_models_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's go where the thread's current device is, and not where their tensors are."""
    chosen = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise ModelError("as far as it gets without one")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(ModelError, match="as far"):
        LlamaModel.load(make_tiny_model(tmp_path), "float32", "cuda:1")
    assert chosen == [torch.device("cuda", 1)]


def test_a_whole_step_stays_on_the_models_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch's device without data: nothing of a step or of its result is made elsewhere."""
    folder = make_tiny_model(tmp_path, arch="qwen3", head_dim=24, attention_bias=True)
    meta, plain = torch.device("meta"), select_ops(torch.device("cpu"), "torch")
    monkeypatch.setattr(model_module, "choose_row_plan", lambda weights: (RowPlan(), True))
    monkeypatch.setattr(model_module, "select_ops", lambda *_, **__: plain)
    tensors = load_weights(folder, torch.bfloat16, meta)
    runner = Runner(LlamaModel(ModelConfig.load(folder), tensors, weights_fingerprint=""), 16)
    step = runner._step_input(
        Batch([BatchItem(TOKEN_IDS, 0, list(range(13)), 3), BatchItem([1], 20, [14, 15], 1)])
    )
    made = [step.token_ids, step.positions, step.slots, step.logit_rows, step.attention.out_rows]
    for group in step.attention.groups:
        made += [group.query_rows, group.key_rows, group.mask]
    with torch.inference_mode():
        made.append(runner.model.forward(step, runner.cache))
    assert {tensor.device for tensor in made} == {meta}
    assert made[-1].shape == (4, 384)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_agrees_with_the_cpu(tmp_path: Path, dtype: str) -> None:
    """The same operations on a GPU give the CPU's logits but for rounding."""
    folder = make_tiny_model(tmp_path, arch="qwen3", head_dim=24)
    expected = logits(LlamaModel.load(folder, dtype), TOKEN_IDS)
    found = logits(LlamaModel.load(folder, dtype, "cuda:0"), TOKEN_IDS)
    assert found.device.type == "cpu"
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
