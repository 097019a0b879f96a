"""Load generators for OpenAI's API, each in a venv of its own: they run to the end without errors.

They send what no plain client sends, and count tokens in their own way.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Addresses
from tests.support.venvs import INSTALL_S, venv_python

RUN_S = 300.0
# The first run has them to install.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + RUN_S + 120)]

REQUESTS, TOKENS = 12, 16


def run(folder: Path, python: Path, *arguments: str, **variables: str) -> str:
    """What it printed. Variables of ours are not passed on."""
    ours = ("HF_", "OTEL_", "OUTRIDER_", "PYTHON")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(python), "-m", *arguments],
        cwd=folder,
        env=clean | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(gateway: Addresses, tmp_path: Path, path: str) -> None:
    """All requests succeed, and its count of tokens is the one that was asked for."""
    python = venv_python("guidellm", "guidellm==0.8.1", "torch==2.13.0")
    backend = {
        "kind": "openai_http",
        "target": gateway.http.removesuffix("/v1"),
        "model": gateway.model,
        "request_format": path,
        "api_routes": {"/health": "readyz"},
    }
    report = tmp_path / "report.json"
    run(
        tmp_path,
        python,
        *("guidellm", "run", "--disable-console", "--backend", json.dumps(backend)),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={gateway.folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    answers = benchmark["requests"]["successful"]
    assert [answer["output_tokens"] for answer in answers] == [TOKENS] * REQUESTS
    assert all(answer["time_to_first_token_ms"] > 0 for answer in answers)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(gateway: Addresses, tmp_path: Path, kind: str) -> None:
    """All requests succeed, and the tokens that we count are the ones that were asked for."""
    python = venv_python("aiperf", "aiperf==0.13.0")
    run(
        tmp_path,
        python,
        *("aiperf", "profile", "--ui=none", "--streaming", f"--endpoint-type={kind}"),
        *("--model", gateway.model, "--url", gateway.http.removesuffix("/v1")),
        *("--tokenizer", str(gateway.folder), "--use-server-token-count"),
        *("--concurrency=4", f"--request-count={REQUESTS}", "--isl=32", f"--osl={TOKENS}"),
        *("--extra-inputs", "ignore_eos:true", f"--output-artifact-dir={tmp_path}"),
        HOME=str(tmp_path),
    )
    lines = (tmp_path / "profile_export.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [record.get("error") for record in records] == [None] * REQUESTS
    counts = [record["metrics"]["output_sequence_length"]["value"] for record in records]
    assert counts == [TOKENS] * REQUESTS
