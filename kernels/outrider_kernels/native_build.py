"""Compiles the C++ sources on first use, with the compiler that the machine has, and keeps them.

    <package>/lib/<name>.so         compiled beforehand, for a machine without a compiler
    <cache>/kernels/<name>.so       compiled on first use; <name> has a hash of all that decides it
    <cache>/kernels/.lock           held by whoever compiles

Each library ends with the hash of its bytes. The cache's are compared with it before they are
loaded: a file that a full disk or a power cut damaged would end the process without a word. What
no process has started with for KEPT_DAYS is removed when another library is compiled.

The cache is $OUTRIDER_CACHE, else $XDG_CACHE_HOME/outrider, else ~/.cache/outrider. A library is
for one instruction set and needs nothing but the C++ runtime: it fits any processor that has the
set, and any version of torch.

Run as a program it compiles for every instruction set: into the folder that it is given, for all
processors of the machine's kind, or into the cache, for this one. Knows nothing of what is
compiled, and imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
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
PROCESSOR = Path("/proc/cpuinfo")
UNITS = ("isa", "sums", "attention", "sampling")
"""Sources that are compiled with the flags of the instruction set."""
PLAIN_UNITS = ("api", "team", "pack")
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 300.0
KEPT_DAYS = 30.0
SEAL = hashlib.sha256
"""Of what a library ends with; loaders do not look behind the last section."""


class Unavailable(Exception):
    """There is no library, for the reason that it says; the plain torch operations go on."""


def instruction_sets() -> list[str]:
    """What there is code for on a machine like this, the fastest first."""
    return [*INSTRUCTION_SETS.get(platform.machine(), {}), "generic"]


def runnable_sets() -> list[str]:
    """Those of them that this processor says it has; all where nothing tells what it has."""
    try:
        lines = PROCESSOR.read_text(errors="replace").splitlines()
    except OSError:
        return instruction_sets()
    for line in lines:
        if line.startswith("flags"):
            told = {f"-m{flag.replace('_', '')}" for flag in line.split()}
            return [isa for isa in instruction_sets() if told.issuperset(_flags_of(isa))]
    return instruction_sets()


def cache_folder() -> Path:
    """Where libraries are kept that were compiled on first use."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "outrider" / "kernels"


def find_library(isa: str) -> Path:
    """The library for one of `instruction_sets`, compiled now if it must be. Raises Unavailable."""
    path, compiler = _place_of(isa)
    if compiler is None:
        return path
    try:
        if not is_whole(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile_once(compiler, isa, path)
        _check_owner(path)
        with contextlib.suppress(OSError):  # a cache that can only be read
            os.utime(path)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept: {error}") from error
    return path


def prospect() -> str:
    """What a service's start will find for this processor, in words; compiles and loads nothing.
    Raises Unavailable where it will find that there is nothing."""
    isa = runnable_sets()[0]
    path, compiler = _place_of(isa)
    try:
        if compiler is None or is_whole(path):
            return f"compiled C++ for {isa}"
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept: {error}") from error
    return f"C++ for {isa}, which {compiler[0]} compiles at the first start"


def _place_of(isa: str) -> tuple[Path, list[str] | None]:
    """Where a library is or will be, and the compiler that makes it; None: it came with us."""
    beforehand = BEFOREHAND / f"{_name(isa)}.so"
    if beforehand.exists():
        return beforehand, None
    compiler = find_compiler()
    return cache_folder() / f"{_name(isa, _version_of(compiler))}.so", compiler


def is_whole(path: Path) -> bool:
    """Whether there is a library with every byte that `compile_library` put there."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    size = SEAL().digest_size
    return content[-size:] == SEAL(content[:-size]).digest()


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


def compile_library(compiler: list[str], isa: str, path: Path) -> None:
    """Compile for an instruction set and put the library there in one rename."""
    began = time.monotonic()
    extra = (*_flags_of(isa), f"-DISA={isa}")
    units = [(name, extra) for name in UNITS] + [(name, ()) for name in PLAIN_UNITS]
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as folder:
        objects = {name: str(Path(folder) / f"{name}.o") for name, _ in units}
        _run_all(
            [
                [*compiler, *FLAGS, *flags, "-c", f"{SOURCES / name}.cpp", "-o", objects[name]]
                for name, flags in units
            ],
            folder,
        )
        library = Path(folder) / path.name
        _run_all(
            [[*compiler, "-shared", "-pthread", *objects.values(), "-o", str(library)]], folder
        )
        code = library.read_bytes()
        library.write_bytes(code + SEAL(code).digest())
        library.chmod(0o755)
        library.replace(path)
    logger.info("compiled the operations for %s in %.1f s", isa, time.monotonic() - began)


def _run_all(commands: list[list[str]], folder: str) -> None:
    """Run them side by side; Unavailable with what the compiler says of the first that fails.

    Their temporary files are in the folder, and what they start ends with them.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        with _process_group() as group:
            for command in commands:
                running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                        env={**os.environ, "TMPDIR": folder},
                        process_group=group,
                    )
                )
            for process in running:
                errors = process.communicate(timeout=COMPILE_TIMEOUT_S)[1]
                if process.returncode:
                    lines = (line for line in errors.splitlines() if "error" in line)
                    said = next(lines, errors[:200]).strip()
                    raise Unavailable(f"the C++ compiler {commands[0][0]} failed: {said}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the C++ compiler took more than {COMPILE_TIMEOUT_S:.0f} s") from None
    finally:
        for process in running:
            process.communicate()


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """A group for processes, all of which are killed when this is left, or when this process dies.

    A compiler's own children are: ending it alone would leave them. The first of the group waits
    for the end of a pipe that nobody writes to and that ends with us, however we end.
    """
    command = ["sh", "-c", "read nothing; kill -s KILL 0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as first:
        yield first.pid


def _compile_once(compiler: list[str], isa: str, path: Path) -> None:
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
        if is_whole(path):
            return
        if path.exists():
            logger.warning("damaged, so compiled again: %s", path)
        for leftover in path.parent.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        logger.info("compiling the operations for %s, this once: %s", isa, path)
        compile_library(compiler, isa, path)
        for other in path.parent.glob("outrider-kernels-*.so"):
            with contextlib.suppress(OSError):  # another user's
                if time.time() - other.stat().st_mtime > KEPT_DAYS * 86400:
                    other.unlink()


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


def _flags_of(isa: str) -> tuple[str, ...]:
    """What the compiler is to be told for one of `instruction_sets`."""
    return INSTRUCTION_SETS.get(platform.machine(), {}).get(isa, ())


def _name(isa: str, compiler: str = "") -> str:
    """A library's name: of the sources, the flags, the machine and the compiler."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((FLAGS, _flags_of(isa), SEAL().name, platform.machine(), compiler)).encode())
    return f"outrider-kernels-{isa}-{digest.hexdigest()[:24]}"


def _check_owner(path: Path) -> None:
    """Raise Unavailable for a library that somebody else could have written: it is code."""
    for each in (path, path.parent):
        status = each.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise Unavailable(f"{each} could have been written by another user")


def main(folder: Path | None) -> None:
    """Compile for every instruction set, as the module says."""
    try:
        if folder is None:
            for isa in runnable_sets():
                find_library(isa)
            return
        folder.mkdir(parents=True, exist_ok=True)
        for isa in instruction_sets():
            compile_library(find_compiler(), isa, folder / f"{_name(isa)}.so")
    except Unavailable as unavailable:
        sys.exit(str(unavailable))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
