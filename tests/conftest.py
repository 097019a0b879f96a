"""What every test shares: a process set up for bit-equal arithmetic, and model folders.

The variables are set here, before any test module can import torch, because MKL and OpenMP read
them once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Rows of a float32 product must not depend on how many rows there are (see docs/LOG.md).
os.environ["MKL_CBWR"] = "AUTO,STRICT"
# Two threads let a test compare with one; waiting threads must not spin on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# No test talks to a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from tests.support import kernels, precision
from tests.support.certificates import Authority

SMOLLM2 = "smollm2-135m-instruct"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--dtype`, `--kernels`: of all models that leave them open."""
    choices = ("float32", "bfloat16", "int8", "int4")
    parser.addoption("--dtype", choices=choices, help="precision of models that may have any")
    parser.addoption("--kernels", choices=("triton",), help="what computes, in its interpreter")


def pytest_configure(config: pytest.Config) -> None:
    """Before any module is imported, so that its constants can follow."""
    if config.getoption("dtype"):
        os.environ[precision.VARIABLE] = config.getoption("dtype")
    if config.getoption("kernels"):
        os.environ[kernels.VARIABLE] = config.getoption("kernels")
        os.environ["TRITON_INTERPRET"] = "1"
        kernels.prefer_triton()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter is slow, and warns of itself: loop bounds that numpy 2.4 refuses."""
    if kernels.are_interpreted():
        for item in items:
            item.add_marker(pytest.mark.timeout(900), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array"))
            item.add_marker(pytest.mark.filterwarnings("ignore:All-NaN slice"))
            if "smollm2_folder" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="too large for Triton's interpreter"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of `each_dtype` run in all of them, or in the one of `--dtype`."""
    if "each_dtype" in metafunc.fixturenames:
        one = metafunc.config.getoption("dtype")
        metafunc.parametrize("each_dtype", (one,) if one else precision.EACH, indirect=True)


@pytest.fixture(scope="module")
def each_dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """One precision after the other, for models that the module's tests and fixtures start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(precision.VARIABLE, request.param)
        yield str(request.param)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder; `make test` fetches it first."""
    from outrider.models.resolve import resolve

    return resolve(SMOLLM2)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A CA of the test's own."""
    return Authority(tmp_path / "ours")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    """Somebody else's."""
    return Authority(tmp_path / "theirs")
