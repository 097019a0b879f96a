"""The examples of docs/examples, as a reader runs them: also where there are keys and TLS."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.client import ClientTls
from protos.outrider.v1 import inference_pb2 as pb
from tests.support import node
from tests.support.certificates import Authority
from tests.support.gateways import gateway_with, write_tokenizer_folder
from tests.support.scripted_target import Script

pytestmark = pytest.mark.timeout(240)  # npm's download

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BIN = Path(sys.executable).parent
KEY = "an-example-of-a-key"
SCRIPT = Script([70, 71, 72, 73, 74], block=3)

Run = Callable[[dict[str, str]], subprocess.CompletedProcess[str]]


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In the environment of the tests, without settings of whoever runs them."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OUTRIDER_")}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(word) for word in command],
        env={**inherited, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def python(script: str) -> Run:
    """An example in Python."""
    return lambda variables: run(sys.executable, EXAMPLES / "python" / script, **variables)


def grpcurl(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The example for grpcurl."""
    return run(EXAMPLES / "grpcurl" / "ask.sh", **variables)


@pytest.fixture
def javascript(tmp_path: Path) -> Run:
    """The example for Node.js."""
    folder = node.project(EXAMPLES / "node", tmp_path)
    protos = {"OUTRIDER_PROTOS": str(ROOT)}
    return lambda variables: node.run(folder, "chat.mjs", **protos, **variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


def keys_file(folder: Path) -> str:
    """One that knows the key."""
    path = folder / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f'[[keys]]\nname = "example"\nsha256 = "{digest}"\n')
    return str(path)


@pytest.fixture(params=["ask.py", "stubs.py", "chat.mjs", "ask.sh"])
def program(request: pytest.FixtureRequest) -> Run:
    """Each of them."""
    if request.param.endswith(".py"):
        return python(request.param)
    return grpcurl if request.param == "ask.sh" else request.getfixturevalue("javascript")


async def test_prints_the_answer_and_what_drafts_did(folder: Path, program: Run) -> None:
    """As a reader would see it who has just started a gateway."""
    async with gateway_with(folder, SCRIPT) as (gateway, target):
        done = await asyncio.to_thread(program, {"OUTRIDER_ADDRESS": gateway.address})
        expected = await gateway.ask(pb.GenerateRequest(text="x"))
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("{"):  # grpcurl's JSON
        assert '"models"' in done.stdout and '"FINISH_REASON_LENGTH"' in done.stdout
        assert done.stdout.count('"drafted": true') == 3
    else:
        assert done.stdout.startswith(expected.text)
        assert "3 of 3 drafts stood" in done.stdout
    assert target.seen.requests[0].stopping.max_tokens == 64


async def test_shows_its_key(folder: Path, tmp_path: Path, program: Run) -> None:
    """An answer with the key that the gateway asks for, and a refusal in words without it."""
    async with gateway_with(folder, SCRIPT, api_keys=keys_file(tmp_path)) as (gateway, _):
        where = {"OUTRIDER_ADDRESS": gateway.address}
        done = await asyncio.to_thread(program, {**where, "OUTRIDER_API_KEY": KEY})
        refused = await asyncio.to_thread(program, where)
    assert done.returncode == 0, done.stderr
    assert refused.returncode != 0
    assert "authorization: Bearer" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("program", ["ask.py", "chat.mjs", "ask.sh"], indirect=True)
async def test_speaks_tls(folder: Path, tmp_path: Path, program: Run) -> None:
    """To a gateway whose certificate its own authority has signed, and to no other; with a
    certificate of its own, which this gateway asks for."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair, own = ours.issue("gateway"), ours.issue("client")
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.ca)}
    tls = ClientTls(ours.ca, own.cert, own.key)
    async with gateway_with(folder, SCRIPT, tls=tls, **settings) as (gateway, _):
        where = {
            "OUTRIDER_ADDRESS": gateway.address,
            "OUTRIDER_TLS_CERT": str(own.cert),
            "OUTRIDER_TLS_KEY": str(own.key),
        }
        done = await asyncio.to_thread(program, {**where, "OUTRIDER_TLS_CA": str(ours.ca)})
        wrong = await asyncio.to_thread(program, {**where, "OUTRIDER_TLS_CA": str(theirs.ca)})
    assert done.returncode == 0, done.stderr
    assert wrong.returncode != 0 and wrong.stdout.strip() == ""


def test_a_seed_gives_a_choice_again(gateway_address: str) -> None:
    """The example with several choices, on a model that samples."""
    done = run(sys.executable, EXAMPLES / "python" / "choices.py", OUTRIDER_ADDRESS=gateway_address)
    assert done.returncode == 0, done.stderr
    *choices, last = done.stdout.splitlines()
    assert len(choices) == 3 and len({line.split()[2] for line in choices}) == 3
    assert last == "the last one again: same text"
