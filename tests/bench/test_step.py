"""The bench of a step: what its steps are made of, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.step import Steps, batch_of, print_table, run
from outrider.engine.device import DTYPES
from tests.support.tiny_models import make_tiny_model


def test_rows_of_one_sequence_and_of_many() -> None:
    """Few are one sequence that verifies; many are as many sequences. All end at the context."""
    tables = [[i] for i in range(32)]
    (five,) = batch_of(5, 256, tables).items
    assert (len(five.token_ids), five.end, five.num_logits) == (5, 256, 5)
    many = batch_of(16, 256, tables).items
    assert [(len(item.token_ids), item.end, item.num_logits) for item in many] == [(1, 256, 1)] * 16
    assert [item.block_table for item in many] == tables[:16]


def test_ratios_are_of_one_round() -> None:
    """A round in which everything takes twice as long changes no ratio."""
    import torch

    steps = Steps(None, torch.ones(1000), {})  # type: ignore[arg-type]
    steps.read_s = [1.0, 2.0]
    steps.step_s = {1: [2.0, 4.0], 8: [3.0, 6.0]}
    report = steps.report()
    assert report["1"]["over_floor"] == 2 and report["1"]["over_one_row"] == 1
    assert report["8"]["over_floor_95"] == [3, 3] and report["8"]["over_one_row_95"] == [1.5, 1.5]
    assert report["8"]["ms"] == 4500 and report["8"]["least_ms"] == 3000
    assert steps.read_gb_s == [4e-6, 2e-6]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny model's folder."""
    return make_tiny_model(tmp_path / "tiny")


def test_it_runs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every precision that there is, and every number of rows, has its figures."""
    report = json.loads(json.dumps(run(tiny, list(DTYPES), 2, context=64)))
    assert report.pop("read_gb_s") > 0 and report.pop("other_cores") >= 0
    assert report.keys() == {"bf16" if name == "bfloat16" else name for name in DTYPES}
    for by_rows in report.values():
        assert list(by_rows) == ["1", "2", "5", "8", "16", "32"]
        assert all(it["ms"] >= it["least_ms"] > 0 for it in by_rows.values())
    print_table(report)
    assert capsys.readouterr().out.count("\n") == 1 + 6 * len(DTYPES)
