"""Compiles the C++ sources on first use, with the compiler that the machine has, and keeps them.

    <package>/lib/<name>.so         compiled beforehand, for a machine without a compiler
    <cache>/kernels/<name>.so       compiled on first use; <name> has a hash of all that decides it
    <cache>/kernels/.lock           held by whoever compiles

The cache is $OUTRIDER_CACHE, else $XDG_CACHE_HOME/outrider, else ~/.cache/outrider. The library has
the code for every instruction set and needs nothing but the C++ runtime: it fits any processor of
the machine's kind and any version of torch.

Run as a program it compiles beforehand, into the folder that it is given. Knows nothing of what is
compiled, and imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "csrc"
BEFOREHAND = PACKAGE / "lib"
COMPILERS = ("c++", "g++", "clang++")
# No contraction: which products and sums are fused is written down, so bits are the same with any
# compiler.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq")
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2": _AVX2,
    },
}
"""Beside `generic`, by machine, the fastest first; with the compiler's flags."""
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """There is no library, for the reason that it says; the plain torch operations go on."""


def instruction_sets() -> list[str]:
    """What the library has code for on a machine like this, the fastest first."""
    return [*INSTRUCTION_SETS.get(platform.machine(), {}), "generic"]


def cache_folder() -> Path:
    """Where libraries are kept that were compiled on first use."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "outrider" / "kernels"


def find_library() -> Path:
    """The library, compiled now if it must be. Raises Unavailable."""
    beforehand = BEFOREHAND / f"{_name()}.so"
    if beforehand.exists():
        return beforehand
    compiler = find_compiler()
    path = cache_folder() / f"{_name(_version_of(compiler))}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile_once(compiler, path)
        _check_owner(path)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept: {error}") from error
    return path


def find_compiler() -> list[str]:
    """$CXX, or the first of the usual names on the path, as words of a command."""
    if given := os.environ.get("CXX"):
        words = shlex.split(given)
        if words and shutil.which(words[0]):
            return words
        raise Unavailable(f"there is no compiler {given!r}, which CXX names")
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise Unavailable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the path")


def compile_library(compiler: list[str], path: Path) -> None:
    """Compile for every instruction set and put the library there in one rename."""
    extra = {"generic": (), **INSTRUCTION_SETS.get(platform.machine(), {})}
    units = [("isa.cpp", (*flags, f"-DISA={name}"), name) for name, flags in extra.items()]
    units += [("api.cpp", (), "api"), ("team.cpp", (), "team"), ("pack.cpp", (), "pack")]
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as folder:
        objects = [str(Path(folder) / f"{name}.o") for _, _, name in units]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", target]
            for (source, flags, _), target in zip(units, objects, strict=True)
        ]
        _run_all(commands)
        library = Path(folder) / path.name
        _run_all([[*compiler, "-shared", "-pthread", *objects, "-o", str(library)]])
        library.chmod(0o755)
        library.replace(path)


def _run_all(commands: list[list[str]]) -> None:
    """Run them side by side; Unavailable with what the compiler says of the first that fails."""
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            )
        for process in running:
            errors = process.communicate(timeout=COMPILE_TIMEOUT_S)[1]
            if process.returncode:
                said = next((line for line in errors.splitlines() if "error" in line), errors[:200])
                raise Unavailable(f"the C++ compiler {commands[0][0]} failed: {said.strip()}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the C++ compiler took more than {COMPILE_TIMEOUT_S:.0f} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _compile_once(compiler: list[str], path: Path) -> None:
    """Compile unless another process has while we waited for it."""
    with (path.parent / ".lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"another process holds {lock.name}") from None
                time.sleep(0.05)
        if not path.exists():
            for leftover in path.parent.glob(".partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            logger.info("compiling the operations, this once: %s", path)
            compile_library(compiler, path)


def _version_of(compiler: list[str]) -> str:
    """What it says of itself."""
    try:
        done = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    if done.returncode:
        raise Unavailable(f"the C++ compiler {compiler[0]} does not run: {done.stderr.strip()}")
    return " ".join(compiler) + done.stdout


def _name(compiler: str = "") -> str:
    """The library's name: of the sources, the flags, the machine and the compiler."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    sets = INSTRUCTION_SETS.get(platform.machine(), {})
    digest.update(repr((FLAGS, sets, platform.machine(), compiler)).encode())
    return f"outrider-kernels-{digest.hexdigest()[:24]}"


def _check_owner(path: Path) -> None:
    """Raise Unavailable for a library that somebody else could have written: it is code."""
    for each in (path, path.parent):
        status = each.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise Unavailable(f"{each} could have been written by another user")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        compile_library(find_compiler(), folder / f"{_name()}.so")
    except Unavailable as unavailable:
        sys.exit(str(unavailable))
