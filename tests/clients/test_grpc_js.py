"""A client on Node.js with @grpc/grpc-js, from the .proto files."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.support import node

pytestmark = pytest.mark.timeout(240)  # npm's download and the start of three services

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).parent / "grpc_js" / "client.mjs"
CANCELLED, INVALID_ARGUMENT = 1, 3


@pytest.fixture(scope="module")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with the packages of the example for Node.js."""
    folder = node.project(ROOT / "docs" / "examples" / "node", tmp_path_factory.mktemp("js"))
    shutil.copy(CLIENT, folder)
    return folder


def run(
    folder: Path, address: str, request: dict[str, object], cancel_after: int = 0
) -> tuple[list[dict], dict]:
    """The messages of one call, and its status."""
    done = node.run(folder, CLIENT.name, str(ROOT), address, json.dumps(request), str(cancel_after))
    assert done.returncode == 0, done.stderr
    *messages, last = [json.loads(line) for line in done.stdout.splitlines()]
    return messages, last["status"]


REQUEST = {
    "chat": {"messages": [{"role": "user", "content": "The quick brown fox"}]},
    "sampling": {"temperature": 0.8, "seed": "18446744073709551615"},
    "stopping": {"max_tokens": 24, "ignore_eos": True},
}


def test_streams_an_answer(client_folder: Path, gateway_address: str) -> None:
    """Chunks, then the finish, then OK; a seed of 64 bits survives the way there and back."""
    messages, status = run(client_folder, gateway_address, REQUEST)
    assert status["code"] == 0
    *chunks, last = messages
    ids = [token["id"] for each in chunks for token in each["chunk"]["tokens"]]
    assert len(chunks) > 1 and len(ids) == 24
    assert last["finish"]["reason"] == "FINISH_REASON_LENGTH"
    assert last["finish"]["usage"]["completion_tokens"] == 24
    assert last["finish"]["seed"] == REQUEST["sampling"]["seed"]
    again, _ = run(client_folder, gateway_address, REQUEST)
    assert ids == [token["id"] for each in again[:-1] for token in each["chunk"]["tokens"]]


def test_errors_carry_details(client_folder: Path, gateway_address: str) -> None:
    """The field is in the binary details that any gRPC client can read."""
    messages, status = run(client_folder, gateway_address, {**REQUEST, "n": 17})
    assert (messages, status["code"]) == ([], INVALID_ARGUMENT)
    details = status_pb2.Status.FromString(base64.b64decode(status["bin"][0]))
    bad_request = error_details_pb2.BadRequest()
    assert details.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "n"


def test_cancel(client_folder: Path, gateway_address: str) -> None:
    """A client may leave in the middle; the gateway serves on."""
    long = {**REQUEST, "stopping": {"max_tokens": 400, "ignore_eos": True}}
    messages, status = run(client_folder, gateway_address, long, cancel_after=3)
    assert status["code"] == CANCELLED
    assert all("chunk" in message for message in messages)
    assert run(client_folder, gateway_address, REQUEST)[1]["code"] == 0
