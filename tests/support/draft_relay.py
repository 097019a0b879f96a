"""A Draft server in front of a real drafter that holds its proposals back, for tests.

With `hold_updates` n each proposal leaves only after n updates of its sequence have passed that the
drafter had not seen when it made it: frames cross on the wire, in a way that does not depend on
timing. A target that waits for such a proposal waits in vain: no further update will come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from outrider.serving.channel import open_channel, server_options
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc


class DraftRelay(draft_pb2_grpc.DraftServicer):
    """Passes streams on to `upstream`; each one gets a stream of its own there."""

    def __init__(self, upstream: str, *, hold_updates: int = 0) -> None:
        self.upstream = upstream
        self.hold_updates = hold_updates
        self.proposals_held = 0
        self._port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """Where targets connect."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=server_options())
        draft_pb2_grpc.add_DraftServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0)

    async def Speculate(
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """One stream, passed on frame by frame."""
        outgoing: asyncio.Queue[draft_pb2.SpeculateResponse | None] = asyncio.Queue()
        async with open_channel(self.upstream) as channel:
            call = draft_pb2_grpc.DraftStub(channel).Speculate()
            held = _Held(self, outgoing)
            tasks = [
                asyncio.create_task(self._pass_updates(request_iterator, call, held)),
                asyncio.create_task(self._pass_proposals(call, held, outgoing)),
            ]
            try:
                while (frame := await outgoing.get()) is not None:
                    yield frame
                await context.abort(await call.code(), await call.details())
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_updates(
        self,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        call: grpc.aio.StreamStreamCall,
        held: _Held,
    ) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for frame in requests:
                for update in frame.updates:
                    held.count(update)
                await call.write(frame)
            await call.done_writing()

    async def _pass_proposals(
        self,
        call: grpc.aio.StreamStreamCall,
        held: _Held,
        outgoing: asyncio.Queue[draft_pb2.SpeculateResponse | None],
    ) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (frame := await call.read()) is not grpc.aio.EOF:
                held.take(frame)
        outgoing.put_nowait(None)


class _Held:
    """Proposals of one stream that wait, by sequence."""

    def __init__(self, relay: DraftRelay, outgoing: asyncio.Queue[Any]) -> None:
        self._relay = relay
        self._outgoing = outgoing
        self._updates: dict[int, int] = defaultdict(int)
        self._waiting: dict[int, list[tuple[int, draft_pb2.Proposal]]] = defaultdict(list)

    def count(self, update: draft_pb2.SequenceUpdate) -> None:
        """Another update has passed: what has waited long enough may go."""
        self._updates[update.sequence_id] = update.update_seq
        waiting = self._waiting[update.sequence_id]
        passed = self._updates[update.sequence_id]
        while waiting and (update.finished or waiting[0][0] <= passed):
            self._outgoing.put_nowait(draft_pb2.SpeculateResponse(proposals=[waiting.pop(0)[1]]))

    def take(self, frame: draft_pb2.SpeculateResponse) -> None:
        """Hold the proposals of a frame, pass the rest on."""
        if self._relay.hold_updates == 0:
            self._outgoing.put_nowait(frame)
            return
        passed = []
        for proposal in frame.proposals:
            due = proposal.update_seq + self._relay.hold_updates
            waiting = self._waiting[proposal.sequence_id]
            if not waiting and due <= self._updates[proposal.sequence_id]:
                passed.append(proposal)
            else:
                waiting.append((due, proposal))
                self._relay.proposals_held += 1
        del frame.proposals[:]
        frame.proposals.extend(passed)
        if frame.ByteSize():
            self._outgoing.put_nowait(frame)
