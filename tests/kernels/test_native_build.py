"""The compiled library: made once, kept where it is safe, and done without where it cannot be had.

Compilers are small scripts here.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.models.store import cache_dir
from outrider.serving import settings
from outrider_kernels import native_build, native_library, ops
from outrider_kernels.native_build import (
    Unavailable,
    cache_folder,
    find_library,
    instruction_sets,
    runnable_sets,
)
from tests.support.implementations import library

CPU = torch.device("cpu")


def make_compiler(folder: Path, body: str) -> Path:
    """A script that takes a compiler's place; `$out` is the file that it is to write."""
    path = folder / "fake-c++"
    path.write_text(
        "#!/bin/sh\n"
        'for each; do [ "$last" = -o ] && out="$each"; last="$each"; done\n'
        f'[ "$1" = --version ] && echo "{body}" && exit 0\n{body}\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing compiled beforehand."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "BEFOREHAND", tmp_path / "none")
    native_library.load_library.cache_clear()
    yield tmp_path / "cache"
    native_library.load_library.cache_clear()


def test_the_cache_is_where_models_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels import nothing of ours, and still keep to the same folder."""
    for variables in ({}, {"XDG_CACHE_HOME": "/x"}, {"OUTRIDER_CACHE": "/own"}):
        monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cache_folder() == cache_dir() / "kernels"
    assert settings.KERNELS == ops.KERNELS


def test_it_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that come at once get one library; so does the next start; no leftovers."""
    log = tmp_path / "log"
    compiler = make_compiler(tmp_path, f'echo run >> {log}; sleep 0.1; echo code > "$out"')
    monkeypatch.setenv("CXX", str(compiler))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_library("generic"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(find_library("generic"))
    assert len(found) == 5 and len(set(found)) == 1
    assert found[0].read_bytes().startswith(b"code\n")
    num_units = len(native_build.UNITS) + len(native_build.PLAIN_UNITS)
    assert len(log.read_text().splitlines()) == num_units + 1
    assert {path.name for path in found[0].parent.iterdir()} == {".lock", found[0].name}


def test_what_decides_the_code_names_the_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler, other flags and other sources are another library."""
    names = set()
    for body in ('echo 1 > "$out"', 'echo 2 > "$out"'):
        monkeypatch.setenv("CXX", str(make_compiler(tmp_path, body)))
        names.add(find_library("generic").name)
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-g"))
    names.add(find_library("generic").name)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "isa.cpp").write_text("int x;")
    monkeypatch.setattr(native_build, "SOURCES", sources)
    names.update(find_library(isa).name for isa in instruction_sets())
    assert len(names) == 3 + len(instruction_sets())


def make_processor(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is an x86-64 whose processor says this of itself."""
    path = folder / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(native_build, "PROCESSOR", path)
    monkeypatch.setattr(native_build.platform, "machine", lambda: "x86_64")


ALL_SETS = ["avx512vnni", "avx512", "avx2", "generic"]
AVX2_FLAGS = "flags\t\t: fpu sse2 fma avx f16c avx2"
AVX512_FLAGS = f"{AVX2_FLAGS} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("says", "sets"),
    [
        (f"model name\t: x\n{AVX512_FLAGS} avx512_vnni\n", ALL_SETS),
        (AVX512_FLAGS, ALL_SETS[1:]),
        (f"{AVX2_FLAGS} avx512f avx_vnni", ALL_SETS[2:]),
        ("flags : fpu sse2 avx avx2", ALL_SETS[3:]),
        ("processor : 0", ALL_SETS),
    ],
)
def test_a_processor_says_which_sets_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, sets: list[str]
) -> None:
    """One missing instruction is a missing set; one that says nothing may have them all."""
    make_processor(tmp_path, says, monkeypatch)
    assert runnable_sets() == sets


def test_the_first_use_compiles_for_the_best_set_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one when it is asked for, and never one that the processor has not."""
    make_processor(tmp_path, AVX512_FLAGS, monkeypatch)
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))

    def compiled_for() -> set[str]:
        return {path.name.split("-")[2] for path in cache.glob("kernels/*.so")}

    for isa, sets in ((None, {"avx512"}), ("generic", {"avx512", "generic"})):
        with pytest.raises(Unavailable, match="cannot be loaded"):
            native_library.load_library(isa)
        assert compiled_for() == sets
    with pytest.raises(Unavailable, match="this processor has no avx512vnni"):
        native_library.load_library("avx512vnni")
    assert compiled_for() == {"avx512", "generic"}
    native_build.main(None)
    assert compiled_for() == set(ALL_SETS[1:])


def test_how_long_it_took_is_said(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line before, for whoever waits, and one after; none when there is nothing to do."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        find_library("generic")
        find_library("generic")
    before, after = (record.getMessage() for record in caplog.records)
    assert "for generic, this once" in before
    assert re.search(r"for generic in \d+\.\d s$", after)


def test_a_library_from_beforehand_needs_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that has none, and may run on any processor of the kind."""
    monkeypatch.setattr(native_build, "BEFOREHAND", tmp_path)
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))
    command = [sys.executable, native_build.__file__, str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    monkeypatch.setenv("CXX", "none")
    for isa in instruction_sets():
        assert find_library(isa).read_bytes().startswith(b"code\n")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('echo "isa.cpp:7: error: no such thing" >&2; exit 1', "no such thing"),
        ("exit 1", "failed"),
        ('echo "no library" > "$out"', "cannot be loaded"),
        (": nothing written", "cannot be kept"),
    ],
)
def test_a_compiler_that_fails_is_a_reason_for_plain_torch(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: str,
    reason: str,
) -> None:
    """One line in the log says why, nothing is left behind, and everything else goes on."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, body)))
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        chosen = ops.select_ops(CPU)
    assert chosen.name == "cpu-torch"
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert reason in warning.getMessage()
    assert not list(cache.glob("kernels/.partial-*"))


@pytest.mark.parametrize(
    ("body", "timeout_s", "reason"),
    [
        ("sleep 60", 0.3, "took more than"),
        (
            'case "$*" in *isa.cpp*) until [ -e $TMPDIR/on ]; do sleep 0.02; done; exit 1;; esac; '
            "touch $TMPDIR/on; sleep 60",
            60.0,
            "failed",
        ),
    ],
)
def test_nothing_goes_on_behind_a_failure(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    timeout_s: float,
    reason: str,
) -> None:
    """One that takes too long, and those beside one that fails: with all that they started."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, body)))
    monkeypatch.setattr(native_build, "COMPILE_TIMEOUT_S", timeout_s)
    with pytest.raises(Unavailable, match=reason):
        find_library("generic")


def test_compilers_end_with_the_service(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it compiles: they and what they started end; the next start clears up."""
    alive, folder = tmp_path / "alive", cache / "kernels"
    os.mkfifo(alive)
    body = f"touch $TMPDIR/of-its-own; exec 3> {alive}; sleep 60"
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, body)))
    service = subprocess.Popen([sys.executable, native_build.__file__, str(folder)])
    with alive.open() as held:
        service.kill()
        service.wait()
        assert held.read() == ""  # the end of the file: nobody holds it any more
    assert list(folder.glob(".partial-*/of-its-own"))
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))
    library = find_library("generic")
    assert {path.name for path in folder.iterdir()} == {".lock", library.name}


def test_a_library_that_nobody_uses_goes_in_the_end(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another is compiled, and only then; a start with it counts as use."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))
    used, unused = find_library("generic"), find_library("avx2")
    foreign = cache / "kernels" / "another.so"
    foreign.touch()
    long_ago = time.time() - 31 * 86400
    for path in (used, unused, foreign):
        os.utime(path, (long_ago, long_ago))
    assert find_library("generic") == used
    assert unused.exists()
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-g"))
    other = find_library("generic")
    assert set((cache / "kernels").glob("*.so")) == {used, other, foreign}


def test_what_a_start_will_find(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler, and once it has worked the library; looking for them compiles nothing."""
    monkeypatch.setattr(native_build, "runnable_sets", lambda: ["generic"])
    compiler = make_compiler(tmp_path, 'echo code > "$out"')
    monkeypatch.setenv("CXX", str(compiler))
    assert (
        native_build.prospect() == f"C++ for generic, which {compiler} compiles at the first start"
    )
    assert not cache.exists()
    find_library("generic")
    assert native_build.prospect() == "compiled C++ for generic"
    monkeypatch.setenv("OUTRIDER_CACHE", str(compiler))  # a file in a folder's place
    with pytest.raises(Unavailable, match="cannot be kept"):
        native_build.prospect()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": ""}, r"none of c\+\+, g\+\+, clang\+\+"),
        ({"CXX": "no-such-compiler -O2"}, "which CXX names"),
        ({"OUTRIDER_CACHE": "/proc/nothing"}, "cannot be kept"),
    ],
)
def test_a_machine_without_a_compiler_or_a_place_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    """No compiler, one that is not there, and a cache that cannot be written to."""
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match=reason):
        native_library.load_library()


def test_code_that_others_could_have_written_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library, or its folder, that anybody may write to."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'echo code > "$out"')))
    path = find_library("generic")
    for each in (path, path.parent):
        mode = each.stat().st_mode
        each.chmod(mode | stat.S_IWOTH)
        with pytest.raises(Unavailable, match="another user"):
            find_library("generic")
        each.chmod(mode)
    assert find_library("generic") == path


@pytest.mark.parametrize("kind", ["empty", "half", "zeros", "one bit"])
def test_a_damaged_library_is_compiled_again(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """Loading one would end the process; what a process has loaded stays as it is."""
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, 'seq 9999 > "$out"')))
    path = find_library("generic")
    whole = path.read_bytes()
    half = len(whole) // 2
    damaged = {
        "empty": b"",
        "half": whole[:half],
        "zeros": whole[:half] + bytes(len(whole) - half),
        "one bit": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
    }[kind]
    path.write_bytes(damaged)
    with path.open("rb") as loaded:
        assert find_library("generic") == path
        assert loaded.read() == damaged
    assert path.read_bytes() == whole
    assert "compiled again" in caplog.text


def test_what_is_chosen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """One line each: compiled code by default, torch when asked for or on another device."""
    best = library("generic") and native_library.load_library()
    with caplog.at_level(logging.INFO, logger="outrider_kernels"):
        compiled = ops.select_ops(CPU)
        plain = ops.select_ops(CPU, "torch")
        cuda = ops.select_ops(torch.device("cuda"))
    assert compiled.name == f"cpu-native{native_library.NATIVE_VERSION}-{best.isa}"
    assert (plain.name, cuda.name) == ("cpu-torch", "cuda-torch")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert compiled.name in said[0] and "asked for" in said[1] and "device" in said[2]
    with pytest.raises(ValueError, match="auto or torch or triton, got 'fast'"):
        ops.select_ops(CPU, "fast")


def test_tensors_that_the_library_cannot_read_are_refused() -> None:
    """Other dtypes and caches of another shape: an error, not a wild pointer."""
    library("generic")
    chosen = ops.select_ops(CPU)
    plan = chosen.plan_attention(
        [1], [0], [[0]], block_size=16, num_heads=2, kv_heads=1, num_rows=1
    )
    q, cache = torch.zeros(1, 2, 8), torch.zeros(1, 16, 1, 8)
    for wrong in (
        (q.double(), cache, cache),
        (q, cache.bfloat16(), cache),
        (q, cache[..., :4], cache),
        (q, torch.zeros(1, 8, 1, 8), torch.zeros(1, 8, 1, 8)),
    ):
        with pytest.raises(ValueError):
            chosen.paged_attention(*wrong, plan)
    with pytest.raises(ValueError, match="weights"):
        chosen.rms_norm(q, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        chosen.silu_mul(q.double().view(1, -1))
