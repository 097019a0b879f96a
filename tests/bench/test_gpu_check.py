"""The check of a GPU where there is none."""

from __future__ import annotations

import pytest
import torch

from bench import gpu_check


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and a reason; nothing is checked, and nothing claimed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == gpu_check.NO_GPU == 2
    said = capsys.readouterr()
    assert "no GPU to check: no CUDA device is found" in said.err
    assert said.out == ""
