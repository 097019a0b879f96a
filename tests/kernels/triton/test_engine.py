"""The engine's tests with Triton's kernels in its interpreter: what a GPU's path computes.

Models with heads of 64 and more take the place of the smallest ones; the real model is too large.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_engine_on_tritons_kernels() -> None:
    """All of its tests but those of real models and of a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/engine", "--kernels", "triton", "-q", "-rs",
         "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
