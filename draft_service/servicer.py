"""`Draft.Speculate` and `Draft.GetStatus`: one reader and one writer a stream.

The reader applies updates at once and never waits; the writer composes a frame when the last one is
gone. So a target that stops reading costs nothing: what it missed is not queued but composed later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from draft_service.batch import DraftLoop
from draft_service.book import Capacity, SessionBook
from draft_service.proposers.base import Proposer
from draft_service.record import SequenceRecords
from draft_service.sessions import Session
from draft_service.wire import (
    UpdateReader,
    load_to_proto,
    next_frame,
    pool_to_proto,
    target_hello,
)
from outrider.serving.errors import (
    EngineFailed,
    InvalidRequest,
    OutriderError,
    Overloaded,
)
from outrider.serving.handshake import MAX_FRAME_BYTES, protocol_version
from outrider_kernels.version import NOISE_VERSION
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2

log = structlog.get_logger(__name__)

MAX_STREAMS = 256
_LOAD_EVERY_S = 0.1
_RETRY_AFTER_S = 1.0

_Context = Any  # grpc.aio.ServicerContext: generic over both message types


class _Stream:
    """What one open `Speculate` call shares between its reader, its writer and the loop."""

    def __init__(self, book: SessionBook) -> None:
        self.book = book
        self.ready = asyncio.Event()
        self.ended = False
        self.error: OutriderError | None = None

    def tell(self, session: Session) -> None:
        """`session` may have something to say."""
        self.book.mark(session)
        if self.book.has_something_to_say:
            self.ready.set()

    def drop(self, session: Session) -> None:
        """`session` gets no more drafts, and its target hears so."""
        self.book.drop(session)
        self.ready.set()

    def end(self, error: OutriderError | None = None) -> None:
        """No more frames; with an error the call ends with its status."""
        self.ended = True
        self.error = self.error or error
        self.ready.set()


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Many targets, many sequences, one proposer."""

    def __init__(
        self,
        proposer: Proposer,
        loop: DraftLoop,
        capacity: Capacity,
        records: SequenceRecords,
        *,
        max_window: int,
        instance_id: str,
        hello_timeout_s: float = 10.0,
    ) -> None:
        self._hello_timeout_s = hello_timeout_s
        self._proposer = proposer
        self._loop = loop
        self._capacity = capacity
        self._records = records
        self._max_window = max_window
        self._instance_id = instance_id
        self._streams: set[_Stream] = set()
        self._closed_with: OutriderError | None = None

    async def Speculate(  # named by the contract
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: _Context
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """One stream of one target."""
        if self._closed_with is not None:
            raise self._closed_with
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} streams are open already", _RETRY_AFTER_S)
        ours = self._hello()
        stream = self._open_stream()
        # The call may be cancelled where this generator does not run, so both ways must free.
        context.add_done_callback(lambda _: self._close_stream(stream))
        reader: asyncio.Task[None] | None = None
        try:
            hello = target_hello(await self._first_frame(request_iterator), ours)
            log.info("target connected", instance=hello.instance_id)
            yield draft_pb2.SpeculateResponse(hello=ours)
            reader = asyncio.create_task(self._read(stream, request_iterator, hello))
            async for frame in self._frames(stream, hello):
                yield frame
        finally:
            if reader is not None:
                reader.cancel()
            self._close_stream(stream)

    async def GetStatus(  # named by the contract
        self, request: draft_pb2.DraftGetStatusRequest, context: _Context
    ) -> draft_pb2.DraftGetStatusResponse:
        """What the drafter is and does now."""
        identity = self._proposer.identity
        return draft_pb2.DraftGetStatusResponse(
            model=identity.model,
            weights_fingerprint=identity.weights_fingerprint,
            precision=identity.precision,
            proposer=identity.proposer,
            load=self._load(),
            streams=self.num_streams,
            proposed_tokens=self._records.proposed_tokens,
            pool=pool_to_proto(self._proposer.pool()),
            instance_id=self._instance_id,
            compute_s=self._loop.compute_s,
            state=self._state,
        )

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def _state(self) -> str:
        if self._closed_with is None:
            return "serving"
        return "dead" if isinstance(self._closed_with, EngineFailed) else "draining"

    def refuse_all(self, error: OutriderError) -> None:
        """End every stream with `error`, and each new one."""
        self._closed_with = error
        for stream in self._streams:
            stream.end(error)

    def _open_stream(self) -> _Stream:
        book = SessionBook(
            self._capacity, self._proposer.open, self._close_session, self._records.begin
        )
        stream = _Stream(book)
        self._streams.add(stream)
        return stream

    def _close_stream(self, stream: _Stream) -> None:
        stream.end()
        stream.book.close()
        self._streams.discard(stream)

    def _close_session(self, session: Session) -> None:
        self._loop.withdraw(session)
        self._proposer.close(session)

    async def _first_frame(
        self, requests: AsyncIterator[draft_pb2.SpeculateRequest]
    ) -> draft_pb2.SpeculateRequest:
        """A target that says nothing must not keep one of the streams."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                return await anext(requests)
        except StopAsyncIteration:
            raise InvalidRequest("hello", "the stream ended before a Hello") from None
        except TimeoutError:
            raise InvalidRequest("hello", f"none came within {self._hello_timeout_s:g} s") from None

    async def _read(
        self,
        stream: _Stream,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        hello: draft_pb2.Hello,
    ) -> None:
        updates = UpdateReader(hello, self._max_window, self._capacity.max_len)
        try:
            async for frame in requests:
                for update in updates.read(frame, time.monotonic()):
                    session = stream.book.apply(update)
                    if session is not None:
                        self._loop.offer(session, stream)
                if stream.book.has_something_to_say:
                    stream.ready.set()
        except OutriderError as error:
            log.warning("target broke the protocol", error=str(error))
            stream.end(error)
        except Exception as error:
            log.error("reading a stream failed", exc_info=error)
            stream.end(EngineFailed(f"internal error ({type(error).__name__})"))
        else:
            stream.end()

    async def _frames(
        self, stream: _Stream, hello: draft_pb2.Hello
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        max_bytes = min(MAX_FRAME_BYTES, hello.limits.max_frame_bytes or MAX_FRAME_BYTES)
        next_load_s = 0.0
        while True:
            await stream.ready.wait()
            stream.ready.clear()
            while stream.book.has_something_to_say and not stream.ended:
                now_s = time.monotonic()
                frame = next_frame(stream.book, max_bytes, now_s)
                if not frame.proposals and not frame.gone:
                    continue
                if now_s >= next_load_s:
                    next_load_s = now_s + _LOAD_EVERY_S
                    frame.load.CopyFrom(self._load())
                yield frame
            if stream.error is not None:
                raise stream.error
            if stream.ended:
                return

    def _hello(self) -> draft_pb2.Hello:
        identity = self._proposer.identity
        return draft_pb2.Hello(
            protocol_version=protocol_version(),
            noise_version=NOISE_VERSION,
            instance_id=self._instance_id,
            token_table_hash=identity.token_table_hash,
            vocab_size=identity.vocab_size,
            weights_fingerprint=identity.weights_fingerprint,
            limits=draft_pb2.Limits(
                max_sequences=self._capacity.max_sequences,
                max_len=self._capacity.max_len,
                max_window=self._max_window,
                max_frame_bytes=MAX_FRAME_BYTES,
            ),
        )

    def _load(self) -> target_pb2.DrafterLoad:
        return load_to_proto(
            sessions=self._capacity.num_sequences,
            queue=self._loop.queue_len,
            step_s=self._loop.last_step_s,
            capacity=self._capacity.max_sequences,
        )
