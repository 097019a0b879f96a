"""Preparing the CPU: what a service process sets before its first product."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from outrider.engine.numerics import prepare_cpu
assert "torch" not in sys.modules
prepare_cpu(1)
import torch
assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
assert torch.get_num_threads() == 1
x, weight = torch.randn(512, 576), torch.randn(576, 960)
whole = x @ weight
assert all(torch.equal(x[i : i + 8] @ weight, whole[i : i + 8]) for i in range(0, 512, 8))
"""


@pytest.mark.timeout(120)  # loads torch, which a busy machine takes its time for
def test_prepare_cpu_pins_products_and_threads() -> None:
    """In a fresh process: the library is pinned, threads are set, rows come out alike."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MKL", "OMP"))}
    subprocess.run([sys.executable, "-c", CODE], env=env, check=True, timeout=100)
