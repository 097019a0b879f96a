"""Runs real services inside the test's own event loop, on real ports of the loopback interface."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from outrider.serving.server import listening
from outrider.serving.settings import TargetSettings
from protos.outrider.v1 import target_pb2, target_pb2_grpc
from target_service.service import TargetService

HOST = "127.0.0.1"


class Target:
    """A running target and a stub to it."""

    def __init__(self, service: TargetService, channel: grpc.aio.Channel, address: str) -> None:
        self.service = service
        self.address = address
        self.stub = target_pb2_grpc.TargetStub(channel)

    async def status(self) -> target_pb2.TargetGetStatusResponse:
        """What it says of itself now."""
        return await self.stub.GetStatus(target_pb2.TargetGetStatusRequest(), timeout=5)

    async def ids(self, request: target_pb2.TokenRequest, timeout_s: float = 60) -> list[int]:
        """All token ids of one request; checks that none is missing or doubled."""
        return (await self.answer(request, timeout_s)).ids

    async def answer(self, request: target_pb2.TokenRequest, timeout_s: float = 60) -> Answer:
        """One request to its end."""
        ids: list[int] = []
        finish = None
        async for chunk in self.stub.Generate(request, timeout=timeout_s):
            assert finish is None, "a chunk after the end"
            assert chunk.first_index == len(ids) + len(request.resumed_token_ids)
            ids.extend(token.id for token in chunk.tokens)
            if chunk.HasField("finish"):
                finish = chunk.finish
        assert finish is not None, "a stream without an end"
        assert finish.usage.completion_tokens == len(ids) + len(request.resumed_token_ids)
        return Answer(ids, finish)


class Answer:
    """The ids of a finished request and how it ended."""

    def __init__(self, ids: list[int], finish: target_pb2.TokenFinish) -> None:
        self.ids = ids
        self.finish = finish

    @property
    def speculation(self) -> target_pb2.TokenFinish:
        """What drafts did."""
        return self.finish.speculation


@contextlib.asynccontextmanager
async def running_target(
    model: Path, drafters: str = "", **settings: object
) -> AsyncIterator[Target]:
    """A target on a free port; at the end its pool must be whole and at its baseline."""
    chosen = {"threads": 1, "kv_tokens": 4096} | settings
    service = TargetService(
        TargetSettings(port=0, model=str(model), drafters=drafters, **chosen)  # type: ignore[arg-type]
    )
    async with listening(service, HOST, 0) as server:
        address = f"{HOST}:{server.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Target(service, channel, address)
            assert service.batcher is not None
            assert service.batcher.scheduler.check_integrity() == []
            if not service.batcher.scheduler.running:
                assert service.batcher.scheduler.pool.num_used == 0
