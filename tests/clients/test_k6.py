"""k6, a load generator that reads our streams from the .proto files, and its thresholds."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.serving.errors import EngineFailed
from tests.support.gateways import gateway_with, write_tokenizer_folder
from tests.support.scripted_target import Script

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "k6" / "generate.js"
THRESHOLD_MISSED = 99
NUM_TOKENS = 12
SOME_TOKENS = Script(ids=[300 + step for step in range(NUM_TOKENS)], block=2, delay_s=0.002)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


async def k6(address: str, **variables: object) -> tuple[int, dict[str, Any], str]:
    """Its status, the values of its metrics, and what it complained of."""
    here = Path(sys.executable).parent / "k6"
    program = str(here) if here.exists() else shutil.which("k6")
    assert program, "k6 is missing; the dev extra installs it"
    given = {"ADDRESS": address, "PROTOS": ROOT, "FIRST_TOKEN_MS": 30_000} | variables
    process = await asyncio.create_subprocess_exec(
        *(program, "run", "--no-usage-report", "--quiet", "--log-format=raw", "--address="),
        *(part for name, value in given.items() for part in ("-e", f"{name}={value}")),
        str(SCRIPT),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaints = await process.communicate()
    assert process.returncode in (0, THRESHOLD_MISSED), complaints.decode()
    return process.returncode, json.loads(output), complaints.decode()


async def test_every_stream_ends_well(folder: Path) -> None:
    """32 clients at once: each stream is read to its finish, and no token is lost or doubled."""
    async with gateway_with(folder, SOME_TOKENS) as (gateway, target):
        status, values, complaints = await k6(
            gateway.address, CLIENTS=32, REQUESTS=96, MAX_TOKENS=NUM_TOKENS
        )
        assert status == 0, complaints
        assert (target.seen.finished, target.seen.cancelled) == (96, 0)
        assert gateway.num_running == 0
    assert values["failed"]["rate"] == 0
    assert values["tokens"]["count"] == 96 * NUM_TOKENS


async def test_a_broken_stream_fails_the_run(folder: Path) -> None:
    """The thresholds are ones that can be missed: a target that fails fails every stream."""
    broken = Script(
        ids=SOME_TOKENS.ids, fail_after=4, failure=EngineFailed("the step did not return")
    )
    async with gateway_with(folder, broken) as (gateway, _):
        status, values, complaints = await k6(
            gateway.address, CLIENTS=2, REQUESTS=4, MAX_TOKENS=NUM_TOKENS
        )
    assert status == THRESHOLD_MISSED
    assert values["failed"]["rate"] == 1
    assert "the step did not return" in complaints
