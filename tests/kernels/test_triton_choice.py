"""When Triton's kernels are chosen, and what is said where they are not. No GPU is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.model import LlamaModel
from outrider.model_error import ModelError
from outrider_kernels import ops
from outrider_kernels.model_shape import ModelShape
from outrider_kernels.triton_ops import limits
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("triton")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = ModelShape(
    torch.bfloat16, torch.bfloat16, 576, num_heads=9, kv_heads=3, head_dim=64, vocab_size=49152
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Lets torch find a device of a compute capability."""

    def appear(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    return appear


@pytest.mark.parametrize("capability", limits.CHIPS)
def test_a_gpu_that_forms_are_compiled_for_gets_them(
    gpu: Callable[[int, int], None], capability: tuple[int, int]
) -> None:
    """By default; the name says so, and with which compiler, as bits may depend on both."""
    import triton

    gpu(*capability)
    chosen = ops.select_ops(CUDA, shape=SHAPE)
    assert chosen.name == f"cuda-triton{ops.TRITON_VERSION}-{triton.__version__}"
    assert ops.select_ops(CUDA, "torch", shape=SHAPE).name == "cuda-torch"
    plan = chosen.plan_attention(
        [1, 5], [700, 0], [list(range(44)), [50]], block_size=16, num_heads=9, kv_heads=3,
        num_rows=8,
    )  # fmt: skip
    assert plan.launches == ((32, 2 + 1 + 1),) and plan.num_merges == 1
    assert chosen.chooses_on_device and chosen.row_plan is None


def test_another_chip_gets_them_only_when_asked(
    gpu: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """By default plain torch, with the reason; when asked for, with a warning."""
    gpu(12, 0)
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        assert ops.select_ops(CUDA, shape=SHAPE).name == "cuda-torch"
        assert "-triton" in ops.select_ops(CUDA, "triton", shape=SHAPE).name
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2
    assert all("compute capability 8.0 and 9.0, this device has 12.0" in each for each in said)


def test_chips_of_other_makers_are_not_mistaken(
    gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls AMD's devices cuda, too, and one of them has the capability 9.0."""
    gpu(9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert ops.select_ops(CUDA, shape=SHAPE).name == "cuda-torch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "no forms for heads of 72 values in bfloat16"),
        ({"head_dim": 32}, "no forms for heads of 32 values in bfloat16"),
        (
            {"dtype": torch.float32, "kv_dtype": torch.int8},
            "no forms for heads of 64 values in float32 with a cache in 8 bits",
        ),
        ({"num_heads": 65, "kv_heads": 1}, "65 heads share a KV head, at most 64"),
        ({"hidden_size": 16392}, "16392 values, at most 16384"),
        ({"hidden_size": 1028}, "1028 values, at most 1024"),
        ({"vocab_size": 524289}, "524289 ids, at most 524288"),
    ],
)
def test_models_that_do_not_fit_say_why(
    gpu: Callable[[int, int], None],
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    reason: str,
) -> None:
    """Plain torch by default; an error when they are asked for."""
    gpu(9, 0)
    shape = replace(SHAPE, **change)
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        assert ops.select_ops(CUDA, shape=shape).name == "cuda-torch"
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        ops.select_ops(CUDA, "triton", shape=shape)


def test_a_cache_in_8_bits_has_its_scales_apart(gpu: Callable[[int, int], None]) -> None:
    """As Triton's kernels read them; plain torch on the same device has them in its rows."""
    gpu(9, 0)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        assert ops.select_ops(CUDA, shape=replace(SHAPE, kv_dtype=kv_dtype)).scales_apart
    assert not ops.select_ops(CUDA, "torch", shape=replace(SHAPE, kv_dtype=torch.int8)).scales_apart


def test_a_cache_in_e4m3_is_not_had_without_them(
    gpu: Callable[[int, int], None], tiny_model: Path
) -> None:
    """Nothing takes their place: an error with the reason, whatever was asked for."""
    with pytest.raises(ModelError, match="e4m3 needs Triton's kernels, which.*: they need a GPU"):
        LlamaModel.load(tiny_model, kv_dtype="e4m3")
    gpu(9, 0)
    e4m3 = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="e4m3 needs Triton's kernels, not plain torch"):
        ops.select_ops(CUDA, "torch", shape=e4m3)
    with pytest.raises(ValueError, match="e4m3 needs.*no forms for heads of 72 values"):
        ops.select_ops(CUDA, shape=replace(e4m3, head_dim=72))


def test_groups_of_float32_are_smaller() -> None:
    """Its largest tile has 32 rows."""
    exact = replace(SHAPE, dtype=torch.float32, kv_dtype=torch.float32, head_dim=16)
    assert limits.largest_tile(exact) == 32 and limits.largest_tile(SHAPE) == 128
    assert limits.why_not_for(replace(exact, num_heads=32, kv_heads=1)) is None
    refused = limits.why_not_for(replace(exact, num_heads=33, kv_heads=1))
    assert refused == "33 heads share a KV head, at most 32 may"


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A model folder."""
    return make_tiny_model(tmp_path)


@pytest.mark.parametrize("installed", [True, False])
def test_a_cpu_needs_the_interpreter(
    installed: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variable, and a GPU first, as installing triton alone would not help; a
    service shows it as any other that a model causes."""
    if not installed:
        monkeypatch.setattr(limits, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="need a GPU.*TRITON_INTERPRET=1"):
        LlamaModel.load(tiny_model, kernels="triton")


def test_without_triton_there_is_plain_torch(
    gpu: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And how to get it."""
    gpu(9, 0)
    monkeypatch.setattr(limits, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        assert ops.select_ops(CUDA, shape=SHAPE).name == "cuda-torch"
    assert "pip install 'outrider[gpu]'" in caplog.text
