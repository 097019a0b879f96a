"""Runs real services inside the test's own event loop, on real ports of the loopback interface."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from outrider.serving.channel import open_channel
from outrider.serving.server import Listening, listening
from outrider.serving.settings import TargetSettings
from outrider.serving.tls import ClientTls
from outrider.serving.tracing import Tracing
from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc
from target_service.service import TargetService
from tests.support.precision import chosen_dtype

HOST = "127.0.0.1"


class Target:
    """A running target and a stub to it."""

    def __init__(
        self, service: TargetService, channel: grpc.aio.Channel, address: str, server: Listening
    ) -> None:
        self.service = service
        self.address = address
        self.calls = server.calls
        self.admin_port = server.admin_port
        """0 without one."""
        self.stub = target_pb2_grpc.TargetStub(channel)

    async def status(self) -> target_pb2.TargetGetStatusResponse:
        """What it says of itself now."""
        return await self.stub.GetStatus(target_pb2.TargetGetStatusRequest(), timeout=5)

    async def ids(self, request: target_pb2.TokenRequest, timeout_s: float = 60) -> list[int]:
        """All token ids of one request; checks that none is missing or doubled."""
        return (await self.answer(request, timeout_s)).ids

    async def answer(self, request: target_pb2.TokenRequest, timeout_s: float = 60) -> Answer:
        """One request to its end."""
        (answer,) = await self.choices(request, timeout_s)
        return answer

    async def choices(
        self, request: target_pb2.TokenRequest, timeout_s: float = 60
    ) -> list[Answer]:
        """All choices of one request to their ends, by index."""
        answers: dict[int, Answer] = {}
        num_resumed = len(request.resumed_token_ids)
        async for chunk in self.stub.Generate(request, timeout=timeout_s):
            assert chunk.HasField("seed") == (chunk.index not in answers)
            answer = answers.setdefault(chunk.index, Answer(chunk.seed))
            assert answer.finish is None, "a chunk after the end"
            assert chunk.first_index == len(answer.tokens) + num_resumed
            answer.tokens.extend(chunk.tokens)
            answer.prompt_tokens.extend(chunk.prompt_tokens)
            if chunk.HasField("finish"):
                answer.finish = chunk.finish
        assert sorted(answers) == list(range(request.n or 1))
        for answer in answers.values():
            assert answer.finish is not None, "a stream without an end"
            assert answer.finish.usage.completion_tokens == len(answer.tokens) + num_resumed
        return [answers[index] for index in sorted(answers)]


class Answer:
    """The tokens of a finished choice and how it ended."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: list[sampling_pb2.GeneratedToken] = []
        self.prompt_tokens: list[sampling_pb2.PromptToken] = []
        self.finish: target_pb2.TokenFinish | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return [token.id for token in self.tokens]

    @property
    def speculation(self) -> target_pb2.TokenFinish:
        """What drafts did."""
        return self.finish.speculation


@contextlib.asynccontextmanager
async def running_target(
    model: Path,
    drafters: str = "",
    *,
    tracing: Tracing | None = None,
    admin: bool = False,
    tls: ClientTls | None = None,
    **settings: object,
) -> AsyncIterator[Target]:
    """A target on a free port; at the end its pool must be whole and at its baseline.

    admin: serve metrics over HTTP too. tls: how the test itself asks.
    """
    chosen = {"threads": 1, "kv_tokens": 4096, "dtype": chosen_dtype()} | settings
    service = TargetService(
        TargetSettings(port=0, model=str(model), drafters=drafters, **chosen),  # type: ignore[arg-type]
        tracing,
    )
    async with listening(service, HOST, 0, (HOST, 0) if admin else None) as server:
        address = f"{HOST}:{server.port}"
        async with open_channel(address, tls=tls) as channel:
            yield Target(service, channel, address, server)
            assert service.batcher is not None
            assert service.batcher.scheduler.check_integrity() == []
            if not service.batcher.scheduler.running:
                assert service.batcher.scheduler.pool.num_used == 0
