"""A gateway with a file of keys: who may ask, whose cache it is, whose limit it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.keys import ApiKey
from outrider.serving.settings import SettingsError
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Gateway, gateway_on, gateway_with, until
from tests.support.scripted_target import Script

ALICE, BOB = "or-alice", "or-bob"
REQUEST = pb.GenerateRequest(text="The quick brown fox", priority=50)


def entry(key: str, name: str, **limits: int) -> str:
    """One of the file."""
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    lines = [f"{limit} = {value}" for limit, value in limits.items()]
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{sha256}"', *lines, ""])


async def ask(gateway: Gateway, key: str | None, request: pb.GenerateRequest = REQUEST) -> int:
    """Tokens of the answer."""
    metadata = [("authorization", f"Bearer {key}")] if key else []
    call = gateway.stub.Generate(request, timeout=10, metadata=metadata)
    return sum([len(response.chunk.tokens) async for response in call])


async def refusal(gateway: Gateway, key: str | None) -> grpc.StatusCode:
    """Why a request gets no answer."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(gateway, key)
    assert "or-" not in str(caught.value.details())
    return caught.value.code()


async def test_who_shows_a_key_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    """With the salt and the priority of the key; each method asks for one."""
    file = tmp_path / "keys.toml"
    file.write_text(entry(ALICE, "alice", priority=7) + entry(BOB, "bob"))
    with capture_logs() as lines:
        async with gateway_with(tiny_folder, Script([5] * 3), api_keys=str(file)) as (gateway, at):
            for key in (None, "or-eve"):
                assert await refusal(gateway, key) is grpc.StatusCode.UNAUTHENTICATED
            for call in (
                gateway.stub.Tokenize(pb.TokenizeRequest(text="x")),
                gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[5])),
                gateway.stub.ListModels(pb.ListModelsRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert [await ask(gateway, key) for key in (ALICE, ALICE, BOB)] == [3, 3, 3]
            metadata = [("authorization", f"bearer {BOB}")]
            await gateway.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
    first, second, third = at.seen.requests
    assert first.cache_salt == second.cache_salt != third.cache_salt
    assert (first.priority, third.priority) == (7, 50)
    assert ApiKey("bob", hashlib.sha256(BOB.encode()).digest()).cache_salt == third.cache_salt
    requests = [line for line in lines if line["event"] == "request"]
    assert [line.get("key") for line in requests] == [None, None, "alice", "alice", "bob"]
    assert requests[0]["outcome"] == "refused" and requests[0]["code"] == "unauthenticated"
    assert "or-" not in str(lines)


async def test_limits_are_each_keys_own(tiny_folder: Path, tmp_path: Path) -> None:
    """Tokens that were read and made count; who is over the limit is told when to come back."""
    file = tmp_path / "keys.toml"
    limits = {"tokens_per_minute": 10, "max_tokens": 20}
    file.write_text(entry(ALICE, "alice", **limits) + entry(BOB, "bob"))
    script = Script([5] * 20)
    async with gateway_with(tiny_folder, script, api_keys=str(file)) as (gateway, _):
        assert await ask(gateway, ALICE) == 20
        assert await refusal(gateway, ALICE) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(gateway, BOB) == 20
        more = pb.GenerateRequest(text="x", stopping=sampling_pb2.StoppingParams(max_tokens=21))
        assert await ask(gateway, BOB, more) == 20


async def test_a_key_that_is_removed_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Within moments, without a restart; a file that is no good changes nothing."""
    file = tmp_path / "keys.toml"
    file.write_text(entry(ALICE, "alice"))
    async with gateway_with(tiny_folder, Script([5]), api_keys=str(file)) as (gateway, _):
        assert await ask(gateway, ALICE) == 1
        with capture_logs() as lines:
            file.write_text("what is this")
            await until(lambda: any("stay as they were" in line["event"] for line in lines))
        assert await ask(gateway, ALICE) == 1
        with capture_logs() as lines:
            file.write_text(entry(BOB, "bob"))
            await until(lambda: any(line["event"] == "api keys loaded" for line in lines))
        assert await refusal(gateway, ALICE) is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(gateway, BOB) == 1


async def test_a_missing_file_is_said_at_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    """By the setting's name."""
    with pytest.raises(SettingsError, match="api_keys: .*No such file"):
        async with gateway_on(tiny_folder, ["127.0.0.1:1"], api_keys=str(tmp_path / "none.toml")):
            pass
