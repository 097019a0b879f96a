"""Other precisions and other kinds of model files, through all three services."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sixteen_levels import give_sixteen_levels
from tests.support.stacks import ask, full_stack
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; greedy, it soon repeats itself, so n-gram drafts are good."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", arch="qwen3", head_dim=32)


@pytest.fixture(scope="module")
def half_in_4_bits(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but that 4 bits hold some matrices' weights."""
    folder = shutil.copytree(qwen3, tmp_path_factory.mktemp("models") / "half")
    return give_sixteen_levels(folder, "o_proj", "down_proj")


@pytest.mark.parametrize(
    ("model", "dtype", "precision"),
    [
        *(("qwen3", dtype, dtype) for dtype in ("float32", "bfloat16", "int8")),
        ("qwen3", "auto", "int8"),
        ("half_in_4_bits", "auto", "int8+int4"),
    ],
)
async def test_off_and_on_say_the_same(
    request: pytest.FixtureRequest, model: str, dtype: str, precision: str
) -> None:
    """Drafts change no token in any precision, and the target says which one it is."""
    async with full_stack(request.getfixturevalue(model), dtype=dtype) as (gateway, target):
        off = await ask(gateway, "one river runs", 0, max_tokens=60)
        for k in (1, 4, 8):
            on = await ask(gateway, "one river runs", k, max_tokens=60)
            assert (on.ids, on.text) == (off.ids, off.text)
            assert on.finish.speculation.accepted > 0
        status = await target.status()
        assert status.precision == precision
        assert status.numerics_id.startswith(f"{precision}-cpu-")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_off_and_on_say_the_same_in_bfloat16_on_the_real_model(smollm2_folder: Path) -> None:
    """SmolLM2 in bfloat16, greedy, with drafts that are sometimes right."""
    async with full_stack(smollm2_folder, dtype="bfloat16", threads=2) as (gateway, _):
        for text in ("One two three one two three one", "The capital of France is"):
            off = await ask(gateway, text, 0, max_tokens=48)
            on = await ask(gateway, text, 4, max_tokens=48)
            assert on.ids == off.ids


async def test_a_gguf_file_is_served(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateway and target take the same file and answer as the folder that it was made from."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    gguf = write_gguf(qwen3, tmp_path / "tiny-f32.gguf")
    async with full_stack(qwen3) as (gateway, _):
        expected = await ask(gateway, "one river runs", 4, max_tokens=40)
    async with full_stack(gguf) as (gateway, target):
        answer = await ask(gateway, "one river runs", 4, max_tokens=40)
        assert (answer.ids, answer.text) == (expected.ids, expected.text)
        assert (await target.status()).model == "tiny-f32"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--device=cuda:0"], "device cuda:0 cannot be used"),
        (["--dtype=int3"], "dtype must be auto or float32 or bfloat16 or int8 or int4, got 'int3'"),
        (["--model=/nowhere/m.gguf"], "neither a model folder"),
    ],
)
def test_what_cannot_be_used_ends_the_start_with_a_reason(
    qwen3: Path, flags: list[str], reason: str
) -> None:
    """One line on standard error, no traceback, a failing exit status."""
    command = [sys.executable, "-m", "outrider", "target", f"--model={qwen3}", "--port=0"]
    command += ["--metrics-port=0", *flags]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("service", "flags", "reason"),
    [
        ("target", [], "MambaForCausalLM"),
        ("draft", ["--proposer=model"], "MambaForCausalLM"),
        ("gateway", [], "max_position_embeddings"),
    ],
)
def test_an_unsupported_folder_is_refused_by_each_service(
    qwen3: Path, tmp_path: Path, service: str, flags: list[str], reason: str
) -> None:
    """The config.json of another kind of model: one line that names the file, no traceback."""
    folder = shutil.copytree(qwen3, tmp_path / "mamba")
    config = folder / "config.json"
    config.write_text('{"architectures": ["MambaForCausalLM"], "vocab_size": 384}')
    command = [sys.executable, "-m", "outrider", service, f"--model={folder}", "--port=0"]
    command += ["--metrics-port=0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = [each for each in done.stderr.splitlines() if not each.startswith("{")]
    assert line.startswith(f"Error: {service}: {config}")
    assert reason in line
