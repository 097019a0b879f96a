"""The parts of bench/gpu_check.py that need no GPU to run, at sizes for the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu_check import PRECISIONS
from bench.gpu_graphs import check_graphs
from bench.gpu_kernels import check_kernels
from bench.gpu_models import SMOLLM2_CONFIG, random_model
from bench.gpu_same_output import check_same_output
from bench.gpu_speed import check_speed, read_gb_s
from outrider_kernels import elementwise

CPU = torch.device("cpu")
CONFIG = replace(
    SMOLLM2_CONFIG, vocab_size=300, hidden_size=72, intermediate_size=96, num_layers=2,
    num_heads=4, num_kv_heads=2, max_model_len=256,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_are_right() -> None:
    """Each kernel, type and cache, on one small step."""
    checks = check_kernels(
        CPU, widths=(72,), heads=[(4, 2, 64)], shares=[(20, 3), (0, 2)], matrices=[(72, 50)],
        vocabularies=[300],
    )  # fmt: skip
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split()[0] for check in checks} == {
        "rms_norm", "add_rms_norm", "silu_mul", "rotary", "attention", "linear", "choose",
    }  # fmt: skip


def test_a_wrong_kernel_and_one_that_fails_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks go on behind both."""
    monkeypatch.setattr(elementwise, "silu_mul", lambda x: x[:, : x.shape[1] // 2])
    checks = check_kernels(CPU, widths=(72, 1025), heads=[], matrices=[], vocabularies=[])
    wrong = {check.name for check in checks if not check.ok}
    types = ("bfloat16", "float16", "float32")
    assert {f"silu_mul {name} 72" for name in types} <= wrong
    assert {f"rms_norm {name} 1025" for name in types} <= wrong
    assert {f"rms_norm {name} 72" for name in types} & wrong == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "kv_dtype"), PRECISIONS)
def test_output_is_the_same_with_drafts(dtype: str, kv_dtype: str) -> None:
    """Of a random model; some drafts stand, some do not."""
    model = random_model(CONFIG, dtype, CPU, "triton", kv_dtype)
    report = check_same_output(model, lengths=(4, 20), num_new=8, k=3)
    for found in report.values():
        assert found["differing"] == 0 and found["texts"] == 2
        assert found["drafted"] > 0


def test_steps_are_compared_with_memory() -> None:
    """Every shape has a time and a floor below it."""
    model = random_model(CONFIG, "bfloat16", CPU, "triton")
    gb_s = read_gb_s(CPU, num_bytes=1 << 20, rounds=2)
    report = check_speed(model, gb_s, shapes=((1, 1), (2, 3)), context=32, rounds=1, graph_rows=4)
    assert report.pop("weight_gib") >= 0
    assert set(report) == {"1 x 1", "2 x 3"}
    assert all(step["floor_ms"] >= 0 and step["over_floor"] > 1 for step in report.values())


def test_captured_steps_are_compared() -> None:
    """All of them are replayed, none differs, and tables are laid out ahead."""
    model = random_model(CONFIG, "float32", CPU, "triton")
    report = check_graphs(model, lengths=(4, 20), k=2, rounds=4, graph_rows=8)
    # The first step knows that of the prompt which was short enough to be replayed.
    assert report == {
        "steps": 4, "replayed": 4, "differing": 0, "known_tables": 0.875, "waits": "",
    }  # fmt: skip
