"""Where fetched models lie, and how a folder appears there: whole, or not at all.

    <cache>/models/<name>/                a finished folder with its manifest
    <cache>/models/.<name>.lock           held by whoever builds that folder
    <cache>/models/.<name>.partial-*/     being built; whoever holds the lock sweeps old ones away

The cache is $OUTRIDER_CACHE, else $XDG_CACHE_HOME/outrider, else ~/.cache/outrider.
Knows nothing of where a model comes from.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from outrider.models.errors import FetchFailed

MANIFEST = "outrider-model.json"
# Rises when the conversion writes something else than before, so that old folders are made anew.
FORMAT_VERSION = 1
LOCK_TIMEOUT_S = 600.0


class Source(Protocol):
    """What a folder is made from: its own name, and the hash of the bytes."""

    @property
    def name(self) -> str:
        """The folder's name in the cache."""

    @property
    def gguf_sha256(self) -> str:
        """Of the GGUF file, in hex."""


def cache_dir() -> Path:
    """The folder for everything that can be fetched or made again."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "outrider"


def model_dir(name: str) -> Path:
    """Where the model of that name is or would be."""
    return cache_dir() / "models" / name


def is_complete(entry: Source) -> bool:
    """The folder is there, made from this source by this conversion, no file missing or cut."""
    folder = model_dir(entry.name)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(
            manifest["gguf_sha256"] == entry.gguf_sha256
            and manifest["format_version"] == FORMAT_VERSION
            and all((folder / n).stat().st_size == size for n, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut, or not ours
        return False


@contextmanager
def building(entry: Source, on_wait: Callable[[], None] = lambda: None) -> Iterator[Path | None]:
    """Hold the model's lock and give an empty folder to fill, or None when the model is there.

    Leaving without an error puts the folder in its place in one rename; leaving with one removes
    it. `on_wait` is called once when another process is building the same model.
    """
    target = model_dir(entry.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{entry.name}.lock", on_wait):
        if is_complete(entry):
            yield None
            return
        for leftover in target.parent.glob(f".{entry.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.partial-", dir=target.parent))
        try:
            yield partial
            _seal(entry, partial)
            if target.exists():  # of an older format, or damaged
                target.rename(partial.with_name(partial.name + "-old"))
            partial.rename(target)
        finally:
            for leftover in target.parent.glob(f"{partial.name}*"):
                shutil.rmtree(leftover, ignore_errors=True)


def _seal(entry: Source, folder: Path) -> None:
    """Write the manifest and make all bytes durable before the rename that shows them."""
    folder.chmod(0o755)  # mkdtemp makes it private, and so does the safetensors writer
    for path in folder.iterdir():
        path.chmod(0o644)
    manifest = {
        "name": entry.name,
        "format_version": FORMAT_VERSION,
        "gguf_sha256": entry.gguf_sha256,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """An advisory lock that the kernel drops when its holder dies."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FetchFailed(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:g} s"
                    ) from None
                if not told:
                    on_wait()
                    told = True
                time.sleep(0.1)
        yield
