"""The target's end of a `Speculate` stream, written by hand, for tests of drafters.

`DraftStream` sends frames and keeps everything that comes back; `Follower` puts the proposals of
one sequence together as a target would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.proposers.base import Proposer
from draft_service.service import DraftService, make_proposer
from outrider.serving.channel import open_channel
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from outrider.serving.tracing import Tracing
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, sampling_pb2

WAIT_S = 10.0


def make_hello(**changes: object) -> draft_pb2.Hello:
    """A target's Hello that every drafter accepts, but for `changes`."""
    hello = draft_pb2.Hello(
        protocol_version=draft_pb2.ProtocolVersion(major=1, minor=0),
        noise_version=1,
        instance_id="test-target",
        vocab_size=1000,
    )
    hello.MergeFrom(draft_pb2.Hello(**changes))
    return hello


def make_open(
    prompt_len: int = 0,
    max_len: int = 4096,
    *,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    **sampling: float,
) -> draft_pb2.SequenceOpen:
    """Settings of a sequence; greedy unless told otherwise."""
    return draft_pb2.SequenceOpen(
        prompt_len=prompt_len,
        max_len=max_len,
        sampling=sampling_pb2.SamplingParams(**({"temperature": 0.0} | sampling)),
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
    )


class DraftStream:
    """One stream to a drafter. Every wait is bounded."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self.hello = draft_pb2.Hello()
        self.frames: list[draft_pb2.SpeculateResponse] = []
        # Cancelling a read would cancel the call, so one that took too long goes on.
        self._reading: asyncio.Future[draft_pb2.SpeculateResponse] | None = None

    async def send(self, *updates: draft_pb2.SequenceUpdate) -> None:
        """One frame."""
        await asyncio.wait_for(self.call.write(draft_pb2.SpeculateRequest(updates=updates)), WAIT_S)

    async def receive(self, timeout_s: float = WAIT_S) -> draft_pb2.SpeculateResponse:
        """The next frame; EOFError at the end, TimeoutError when none comes (it may come later)."""
        self._reading = self._reading or asyncio.ensure_future(self.call.read())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            raise TimeoutError(f"no frame within {timeout_s} s")
        frame, self._reading = self._reading.result(), None
        if frame is grpc.aio.EOF:
            raise EOFError("the drafter ended the stream")
        self.frames.append(frame)
        return frame

    async def receive_until(
        self, enough: Callable[[draft_pb2.SpeculateResponse], bool], timeout_s: float = WAIT_S
    ) -> draft_pb2.SpeculateResponse:
        """Frames up to the first one that is `enough`."""
        async with asyncio.timeout(timeout_s):
            while True:
                frame = await self.receive(timeout_s)
                if enough(frame):
                    return frame

    async def expect_silence(self, seconds: float = 0.1) -> None:
        """Fail if a frame comes within `seconds`."""
        with contextlib.suppress(TimeoutError):
            raise AssertionError(f"unexpected frame: {await self.receive(seconds)}")

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the drafter ended the stream; frames still on their way are read first."""
        with contextlib.suppress(grpc.aio.AioRpcError, EOFError):
            while True:
                await self.receive()
        code = await asyncio.wait_for(self.call.code(), WAIT_S)
        return code, await self.call.details()


class Follower:
    """One sequence as its target sees it: confirmed tokens, the drafter's tail behind them."""

    def __init__(
        self, stream: DraftStream, sequence_id: int, opening: draft_pb2.SequenceOpen
    ) -> None:
        self.stream = stream
        self.sequence_id = sequence_id
        self.opening = opening
        self.epoch = 0
        self.confirmed: list[int] = []
        self.tail: list[int] = []
        self.logprobs: list[float] = []
        self.dry = False
        self.window = 0
        self._update_seq = 0
        self._valid_from = 0

    async def open(self, tokens: Sequence[int], window: int) -> None:
        """A new epoch with the whole prefix."""
        self.epoch += 1
        self.confirmed, self.tail, self.logprobs = list(tokens), [], []
        self.window, self._valid_from = window, 0
        await self._send(base_len=0, tokens=tokens, open=self.opening)

    async def confirm(self, tokens: Sequence[int], window: int | None = None) -> None:
        """The target has chosen `tokens`."""
        base_len = len(self.confirmed)
        self.window = self.window if window is None else window
        self._append_confirmed(tokens)
        await self._send(base_len=base_len, tokens=tokens)

    async def finish(self) -> None:
        """The sequence has ended."""
        await self._send(base_len=len(self.confirmed), tokens=[], finished=True)

    async def collect(self, count: int, timeout_s: float = WAIT_S) -> list[int]:
        """Take proposals in until the tail has `count` tokens or the drafter is dry."""
        await collect_all([self], count, timeout_s)
        return self.tail

    def take(self, proposal: draft_pb2.Proposal) -> None:
        """One proposal, checked against what the protocol promises."""
        if proposal.epoch != self.epoch or proposal.seen_len < self._valid_from:
            return  # drafted without knowing where the target went another way
        assert proposal.seen_len <= len(self.confirmed)
        assert proposal.update_seq <= self._update_seq
        end = len(self.confirmed) + len(self.tail)
        assert proposal.start <= end, "no gaps"
        assert proposal.start + len(proposal.tokens) <= len(self.confirmed) + self.window
        assert len(proposal.logprobs) in (0, len(proposal.tokens))
        if proposal.seen_len == len(self.confirmed):
            assert proposal.start == end, "each token is sent once"
            self.dry = not proposal.tokens
        for i, token in enumerate(proposal.tokens):
            position = proposal.start + i
            if position < len(self.confirmed):
                if self.confirmed[position] != token:
                    self._valid_from, self.tail, self.logprobs = position + 1, [], []
                    return
            elif position >= end:
                self.tail.append(token)
                self.logprobs += proposal.logprobs[i : i + 1]

    def _append_confirmed(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.tail and self.tail[0] == token:
                del self.tail[0]
                del self.logprobs[:1]
            elif self.tail:
                self._valid_from, self.tail, self.logprobs = len(self.confirmed) + 1, [], []
            self.confirmed.append(token)

    async def _send(self, **fields: object) -> None:
        self._update_seq += 1
        await self.stream.send(
            draft_pb2.SequenceUpdate(
                sequence_id=self.sequence_id,
                epoch=self.epoch,
                update_seq=self._update_seq,
                window=self.window,
                **fields,
            )
        )


async def collect_all(followers: Sequence[Follower], count: int, timeout_s: float = WAIT_S) -> None:
    """Take proposals in until each tail has `count` tokens or its drafter is dry.

    All `followers` are on one stream; proposals for others are passed over.
    """
    by_id = {each.sequence_id: each for each in followers}
    for follower in followers:
        follower.dry = False
    async with asyncio.timeout(timeout_s):
        while any(len(each.tail) < count and not each.dry for each in followers):
            frame = await followers[0].stream.receive(timeout_s)
            for proposal in frame.proposals:
                if proposal.sequence_id in by_id:
                    by_id[proposal.sequence_id].take(proposal)


@contextlib.asynccontextmanager
async def open_stream(
    address: str, hello: draft_pb2.Hello | None = None, *, wait_for_ready: bool = False
) -> AsyncIterator[DraftStream]:
    """A stream that has shaken hands; `wait_for_ready` waits for a drafter that starts."""
    async with dial(address, wait_for_ready=wait_for_ready) as call:
        stream = DraftStream(call)
        await call.write(draft_pb2.SpeculateRequest(hello=hello or make_hello()))
        stream.hello = (await stream.receive()).hello
        yield stream


@contextlib.asynccontextmanager
async def dial(
    address: str, *, wait_for_ready: bool = False
) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A stream on which nothing has been said yet."""
    async with open_channel(address) as channel:
        call = draft_pb2_grpc.DraftStub(channel).Speculate(wait_for_ready=wait_for_ready)
        try:
            yield call
        finally:
            call.cancel()


@contextlib.asynccontextmanager
async def run_draft_service(
    settings: DraftSettings, proposer: Proposer | None = None, *, tracing: Tracing | None = None
) -> AsyncIterator[RunningDraft]:
    """A draft service on a free port of this event loop; `proposer` replaces the settings' one."""

    async def given(settings: DraftSettings) -> Proposer:
        return proposer

    service = DraftService(settings, given if proposer is not None else make_proposer, tracing)
    async with listening(service, "127.0.0.1", 0) as server:
        yield RunningDraft(f"127.0.0.1:{server.port}", service)


class RunningDraft:
    """A draft service under test."""

    def __init__(self, address: str, service: DraftService) -> None:
        self.address = address
        self.service = service

    async def status(self) -> draft_pb2.DraftGetStatusResponse:
        """What `GetStatus` says."""
        async with open_channel(self.address) as channel:
            stub = draft_pb2_grpc.DraftStub(channel)
            return await stub.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=WAIT_S)

    async def is_serving(self) -> bool:
        """What the health service says."""
        async with open_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def wait_until(
        self, enough: Callable[[draft_pb2.DraftGetStatusResponse], bool]
    ) -> draft_pb2.DraftGetStatusResponse:
        """Status once it is `enough`."""
        async with asyncio.timeout(WAIT_S):
            while not enough(status := await self.status()):  # of a server
                await asyncio.sleep(0.02)
            return status
