"""What the packages are called and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "gguf", "safetensors")


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code` outside of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_not_a_package() -> None:
    """`kernels` stays PyPI's name: transformers imports whatever package is called so."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = find_spec("kernels")
    if spec is not None and spec.origin is not None:
        assert "site-packages" in spec.origin


def test_outrider_kernels_is_installed_by_its_own_name() -> None:
    """The package inside kernels/ is a top-level import, from any working directory."""
    place = run_python("import outrider_kernels; print(outrider_kernels.__file__)").strip()
    assert Path(place).parent.parent.name == "kernels"


@pytest.mark.parametrize(
    "module",
    [
        "outrider.cli.main",
        "outrider.cli.models",
        "outrider.client",
        "outrider.params",
        "outrider.models.fetch",
        "outrider.serving.settings",
        "outrider.serving.server",
        "protos.outrider.v1.inference_pb2_grpc",
    ],
)
def test_the_base_install_imports_nothing_heavy(module: str) -> None:
    """Client and command line work in an install without torch and its company."""
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_the_drafter_without_a_model_needs_no_engine() -> None:
    """Its extra installs no torch, and n-gram lookup imports nothing of the engine's extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["draft"] == ["outrider[service]"]
    assert extras["draft-model"] == ["outrider[draft,engine]"]
    code = f"""
        import asyncio, sys
        from draft_service.service import make_proposer
        from outrider.serving.settings import DraftSettings
        asyncio.run(make_proposer(DraftSettings()))
        print([m for m in {HEAVY} if m in sys.modules])
    """
    assert run_python(textwrap.dedent(code)).strip() == "[]"


def test_the_gateway_needs_no_torch(smollm2_folder: Path) -> None:
    """With its service imported, a tokenizer loaded and a chat rendered, torch is not there."""
    code = f"""
        import sys
        from pathlib import Path
        import gateway.service
        from gateway.tokenizer import ModelTokenizer
        tokenizer = ModelTokenizer.load(Path({str(smollm2_folder)!r}))
        assert tokenizer.encode_chat([("user", "Hi")])
        print([m for m in ("torch", "transformers") if m in sys.modules])
    """
    assert run_python(textwrap.dedent(code)).strip() == "[]"
