"""Programs of other people that are too large to stand beside us: each in a venv of its own.

A venv is made on first use and then kept in the user's cache, where another run of the tests finds
it. Where it cannot be made, the test is skipped.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models.store import cache_dir

INSTALL_S = 1500.0
"""850 MB take three minutes where nothing else runs."""


def venv_python(name: str, *packages: str) -> Path:
    """The interpreter that has the packages, for example "arize-phoenix==20.26.1"."""
    wanted = " ".join(packages)
    folder = cache_dir() / "peers" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    with (folder.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.exists() and mark.exists() and mark.read_text() == wanted):
            _call(wanted, sys.executable, "-m", "venv", "--clear", str(folder))
            pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            _call(wanted, *pip, "--no-compile", *packages)
            mark.write_text(wanted)
    return python


def _call(wanted: str, *command: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{wanted} was not installed within {INSTALL_S:.0f} s")
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        pytest.skip(f"{wanted} cannot be installed: {lines[-1] if lines else 'no reason'}")
