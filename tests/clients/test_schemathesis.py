"""schemathesis, which asks whatever /openapi.json allows and forbids, and holds us to the document.

What it cannot know is left out: that a request which fits the document may still be refused, since
fields depend on each other, on the model's vocabulary and on its context.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.gateways import gateway_on, write_tokenizer_folder
from tests.support.http_gateway import HttpGateway, http_gateway
from tests.support.in_process import running_target
from tests.support.scripted_target import Script
from tests.support.tiny_models import make_tiny_model

KEY = "or-right"
MODEL = "0"
"""What it sends first where any name may stand: so its requests reach the model."""
SCRIPT = Script(ids=range(100, 106), every_choice=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with one key: what needs one can be told from what does not."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f'[[keys]]\nname = "tests"\nsha256 = "{digest}"\n')
    return str(path)


async def check(port: int, folder: Path, *options: str) -> None:
    """Run it against a gateway; AssertionError with all that it found."""
    here = Path(sys.executable).parent / "schemathesis"
    program = str(here) if here.exists() else shutil.which("schemathesis")
    assert program, "schemathesis is missing; the dev extra installs it"
    process = await asyncio.create_subprocess_exec(
        *(program, "run", f"http://127.0.0.1:{port}/openapi.json"),
        f"--header=Authorization: Bearer {KEY}",
        # A machine that is busy may need longer than what it makes up, and then says so with 504.
        "--header=X-Request-Timeout: 600",
        *("--exclude-checks=positive_data_acceptance", "--no-shrink", "--continue-on-failure"),
        *("--no-color", *options),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.mark.timeout(300)
async def test_the_document_holds(tmp_path: Path, keys: str) -> None:
    """No 5xx, no status, header or body that is not in it, and nothing taken that it forbids."""
    folder = write_tokenizer_folder(tmp_path / "tiny")
    async with http_gateway(folder, SCRIPT, api_keys=keys, served_name=MODEL) as gateway:
        options = ("--phases=coverage,fuzzing", "--max-examples=5", "--seed=1")
        await check(gateway.server.port, tmp_path, *options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_document_holds_for_a_real_model(tmp_path: Path, keys: str) -> None:
    """The same with real tokens, scores and drafts' statistics, and every kind of its tests."""
    model = make_tiny_model(tmp_path / "tiny")
    async with (
        contextlib.AsyncExitStack() as clients,
        running_target(model, "127.0.0.1:1", max_model_len=64) as target,
        gateway_on(
            model,
            [target.address],
            http_port=0,
            api_keys=keys,
            served_name=MODEL,
            default_max_tokens=4,
        ) as gateway,
    ):
        await gateway.wait_health(True)
        port = HttpGateway(gateway, None, clients).server.port
        await check(port, tmp_path, "--max-examples=30")
