"""Threads are counted by what a process may use, not by what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.serving.cores import usable_cores

ALLOWED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("share", "cores"),
    [
        ("max 100000", ALLOWED),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("90000000 100000", ALLOWED),
    ],
    ids=["no limit", "one core", "half a core", "more than there are"],
)
def test_a_container_has_its_share(tmp_path: Path, share: str, cores: int) -> None:
    """Whole cores of it, at least one, at most those that the process may run on."""
    (tmp_path / "cpu.max").write_text(f"{share}\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_container_affinity_counts(tmp_path: Path) -> None:
    """Of a process that is held to one core of several."""
    assert usable_cores(tmp_path) == ALLOWED
    code = """
import os
from pathlib import Path
from outrider.serving.cores import usable_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
assert usable_cores(Path("/nowhere")) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15)


def test_services_take_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line tells OpenMP before it loads torch; a setting goes before."""
    from outrider.cli import services

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(services, "usable_cores", lambda: 3)
    services._set_threads(0)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    services._set_threads(5)
    assert os.environ["OMP_NUM_THREADS"] == "5"
