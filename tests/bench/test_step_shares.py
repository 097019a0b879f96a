"""The bench of what a step costs besides the model: a run on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


@pytest.mark.slow  # it starts a target, and twice another process that asks
@pytest.mark.timeout(180)
def test_shares_of_one_stream_and_of_many(tmp_path: Path) -> None:
    """Both kinds of shares, by number of streams; what is named is part of all."""
    folder = make_tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "bench.step_shares", "--model", str(folder), "--threads", "1"]
    run = subprocess.run(
        [*command, "--dtype", "float32", "--tokens", "40"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *parts, last = run.stdout.splitlines()
    assert [line.split(",")[0] for line in parts] == ["1 streams", "32 streams"]
    shares = json.loads(last)
    assert list(shares) == ["1", "32"]
    for share in shares.values():
        assert 0 < share["named"] < share["all"] < 1
