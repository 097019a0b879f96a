"""Every form that a launcher can choose, compiled for real chips: no spills, and it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from outrider_kernels.triton_ops.configs import all_variants
from outrider_kernels.triton_ops.variant import Variant
from tests.kernels.triton.aot import SHARED_LIMITS, compile_for, kernel_of
from tests.kernels.triton.resources import listed

pytestmark = pytest.mark.timeout(180)  # one compiles for 10 s, on a busy machine far longer
SAMPLE = 13
"""One form in so many is compiled in the short suite, all of them in the slow one."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here stays here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def cases() -> list[object]:
    """All forms; every SAMPLE-th of a kernel, from its first on, is not slow."""
    seen: dict[str, int] = {}
    params = []
    for variant in all_variants():
        number = seen[variant.kernel] = seen.get(variant.kernel, -1) + 1
        marks = [pytest.mark.slow] if number % SAMPLE else []
        params.append(pytest.param(variant, id=variant.name, marks=marks))
    return params


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("variant", cases())
def test_form_fits_the_chip(variant: Variant, target: str) -> None:
    """It compiles, spills nothing, fits into shared memory, and copies as its table says."""
    compiled = compile_for(variant, target)
    assert compiled.spilled == 0
    assert compiled.shared <= SHARED_LIMITS[int(target[3:])]
    assert compiled.registers * 32 * variant.num_warps <= 65536
    if variant.copies_16_bytes:
        assert compiled.count("LDGSTS", ".128") > 0
        assert compiled.count("LDG.E.U16") + compiled.count("LDG.E.U8") == 0
    if not variant.fuse_multiply_add:
        text = compiled.kernel.asm["ptx"]
        assert "fma." not in text
        # Told not to fuse, the assembler still divides by such instructions, and rounds rightly.
        assert "div.rn" in text or compiled.count("FFMA") == 0


@pytest.mark.parametrize("target", ["sm_100", "gfx942"])
@pytest.mark.parametrize("kernel", sorted({variant.kernel for variant in all_variants()}))
@pytest.mark.slow
def test_other_chips(kernel: str, target: str) -> None:
    """The first form of each kernel is compiled for chips that nobody claims, without spills."""
    variant = next(v for v in all_variants() if v.kernel == kernel)
    assert compile_for(variant, target).spilled == 0


def test_names_are_unique() -> None:
    """Two forms of one name would be one line in the table of resources, which has them all."""
    names = [variant.name for variant in all_variants()]
    assert len(set(names)) == len(names)
    assert list(listed()) == names


@pytest.mark.parametrize("kernel", sorted({variant.kernel for variant in all_variants()}))
def test_a_call_compiles_no_form_that_is_not_listed(kernel: str) -> None:
    """Types and constants are the kernel's own, and no integer is specialised by its value."""
    for variant in (v for v in all_variants() if v.kernel == kernel):
        params = kernel_of(variant).params
        types, constants = dict(variant.types), dict(variant.constants)
        assert [p.name for p in params] == [*types, *constants]
        for param in params:
            assert param.is_constexpr == (param.name in constants)
            if types.get(param.name, "")[:1] == "i":
                assert param.do_not_specialize, param.name


def test_kernels_are_not_interpreted_here() -> None:
    """The variable of Triton's interpreter belongs to another process."""
    assert "TRITON_INTERPRET" not in os.environ
    assert Path(__file__).parent.joinpath("interpreted").is_dir()
