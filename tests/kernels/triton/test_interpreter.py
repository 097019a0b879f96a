"""Runs the tests of interpreted/, each file in a process of its own with Triton's interpreter.

A process is either for the interpreter or for the compiler: decorators decide when they run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
ONLY_SLOW = {"test_end_to_end"}


def run_interpreted(file: Path, marker: str) -> None:
    """Its tests with a marker, all of them green; none at all is fine for slow ones."""
    arguments = [str(file.relative_to(ROOT)), "-q", "-m", marker, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    nothing_selected = 5
    allowed = (0, nothing_selected) if marker == "slow" else (0,)
    assert done.returncode in allowed, f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem not in ONLY_SLOW], ids=lambda file: file.stem
)
def test_in_the_interpreter(file: Path) -> None:
    """The short tests."""
    run_interpreted(file, "not slow and not gpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter_at_length(file: Path) -> None:
    """The slow ones."""
    run_interpreted(file, "slow")
