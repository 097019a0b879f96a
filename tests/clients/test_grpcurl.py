"""grpcurl, which knows our services by reflection only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)  # the three services start within the first test


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in plain text mode."""
    here = Path(sys.executable).parent / "grpcurl"
    program = str(here) if here.exists() else shutil.which("grpcurl")
    assert program, "grpcurl is missing; the dev extra installs it"
    return subprocess.run(
        [program, "-plaintext", "-max-time", "30", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def messages(output: str) -> list[dict[str, object]]:
    """grpcurl prints JSON values one after the other."""
    decoder, values = json.JSONDecoder(), []
    while output := output.lstrip():
        value, end = decoder.raw_decode(output)
        values.append(value)
        output = output[end:]
    return values


def test_lists_and_describes(gateway_address: str) -> None:
    """The services and their methods are found without our files."""
    listed = grpcurl(gateway_address, "list").stdout.split()
    assert {"outrider.v1.Inference", "grpc.health.v1.Health"} <= set(listed)
    described = grpcurl(gateway_address, "describe", "outrider.v1.Inference").stdout
    assert "rpc Generate" in described and "stream" in described


def test_streams_an_answer(gateway_address: str) -> None:
    """Text and ids come in messages, the finish last, and the usage is what was delivered."""
    request = {
        "text": "The quick brown fox",
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": 24, "ignore_eos": True},
    }
    done = grpcurl("-d", json.dumps(request), gateway_address, "outrider.v1.Inference/Generate")
    assert done.returncode == 0, done.stderr
    *chunks, last = messages(done.stdout)
    ids = [token["id"] for each in chunks for token in each["chunk"].get("tokens", [])]
    assert len(chunks) > 1 and len(ids) == 24
    assert last["finish"]["reason"] == "FINISH_REASON_LENGTH"
    assert last["finish"]["usage"]["completion_tokens"] == 24
    text = "".join(each["chunk"].get("text", "") for each in chunks)
    whole = grpcurl(
        "-d", json.dumps({"ids": ids}), gateway_address, "outrider.v1.Inference/Detokenize"
    )
    assert messages(whole.stdout)[0].get("text", "") == text


def test_errors_say_the_field(gateway_address: str) -> None:
    """INVALID_ARGUMENT with the field in message and details."""
    done = grpcurl(
        "-d",
        json.dumps({"text": "x", "stopping": {"stop": [""]}}),
        gateway_address,
        "outrider.v1.Inference/Generate",
    )
    assert done.returncode != 0
    assert "InvalidArgument" in done.stderr and "stopping.stop" in done.stderr


def test_health(gateway_address: str) -> None:
    """The standard health service answers for the gateway's own."""
    done = grpcurl(
        "-d",
        json.dumps({"service": "outrider.v1.Inference"}),
        gateway_address,
        "grpc.health.v1.Health/Check",
    )
    assert messages(done.stdout) == [{"status": "SERVING"}]
