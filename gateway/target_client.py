"""One target as the gateway sees it: whether it is ready, how busy it is, and calls to it.

A link follows the target's health stream, so it knows within moments when the target drains, dies
or comes back, and checks on each return that both sides use the same tokens. Which target gets a
request is decided in `routing.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from gateway.requests import CheckedRequest
from outrider.serving import wire
from outrider.serving.channel import open_channel
from outrider.serving.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.serving.refusals import explain_refusal
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import target_pb2 as pb
from protos.outrider.v1 import target_pb2_grpc

log = structlog.get_logger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["Target"].full_name
_STATUS_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 1.0
_RETRY_S = 0.25
_SETTLE_S = 1.0
_START_S = 60.0
"""Services that are started together wait for each other: until then that is no news."""
_WAITING = "waiting for the target"

Metadata = tuple[tuple[str, str], ...]


class TargetFailed(OutriderError):
    """A target ended a call with a status that has no class of its own here."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target said of itself when it became ready."""

    max_model_len: int
    max_draft_tokens: int
    eos_token_ids: frozenset[int]
    weights_fingerprint: str = ""
    numerics_id: str = ""


class TargetCall:
    """One running Generate call."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.TokenRequest, pb.TokenChunk],
        on_end: Callable[[], None],
    ) -> None:
        self._call = call
        call.add_done_callback(lambda _: on_end())

    async def chunks(self) -> AsyncGenerator[pb.TokenChunk, None]:
        """The answer, read only as fast as it is asked for. Raises OutriderError."""
        try:
            async for chunk in self._call:
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise _to_error(error) from error

    async def settle(self) -> None:
        """After the finish: let the call end by itself, so that it counts as finished there."""
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                async for _ in self._call:
                    pass

    def cancel(self) -> None:
        """End the call if it runs still."""
        self._call.cancel()


class TargetLink:
    """One target."""

    def __init__(
        self,
        address: str,
        token_table_hash: bytes,
        on_change: Callable[[], None],
        *,
        max_message_bytes: int,
        tls: ClientTls | None = None,
        server_name: str = "",
    ) -> None:
        """tls, server_name: as of `open_channel`."""
        self.address = address
        self.info: TargetInfo | None = None
        """Set while the target is ready."""
        self.reason = "not asked yet"
        """Why it is not ready."""
        self.num_held = 0
        """Choices that this gateway has there or is about to send."""
        self.answers = True
        """It said how busy it is when it was asked last."""
        self._num_others = 0
        self._num_calls = 0
        self._ended = asyncio.Event()
        self._token_table_hash = token_table_hash
        self._on_change = on_change
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._server_name = server_name
        self._task: asyncio.Task[None] | None = None
        self._expected_by = time.monotonic() + _START_S
        self._told = ""
        """What the log says of why it is not ready."""
        self._connect()

    def _connect(self) -> None:
        self._channel = open_channel(
            self.address, self._max_message_bytes, tls=self._tls, server_name=self._server_name
        )
        self._stub = target_pb2_grpc.TargetStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def hold(self, num_choices: int) -> None:
        """These are here from now on, or about to be sent."""
        self.num_held += num_choices

    def release(self, num_choices: int) -> None:
        """They are not any more."""
        self.num_held -= num_choices
        self._ended.set()

    @property
    def load(self) -> int:
        """Choices that run or wait there: ours as of now, others' as of the last report."""
        return self.num_held + self._num_others

    def start(self) -> None:
        """Begin to follow the target's health."""
        self._task = asyncio.create_task(self._follow_forever())

    async def close(self) -> None:
        """Stop following and cut the connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._channel.close(None)

    async def close_when_idle(self) -> None:
        """Stop following now, and cut the connection when nobody has a call or is about to."""
        try:
            if self._task is not None:
                self._task.cancel()
            self.info = None
            while self._num_calls or self.num_held:
                self._ended.clear()
                await self._ended.wait()
        finally:
            await self.close()

    async def refresh_load(self) -> None:
        """Ask how busy it is."""
        held = self.num_held
        self._num_calls += 1
        try:
            request = pb.TargetGetStatusRequest()
            status = await self._stub.GetStatus(request, timeout=_LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            self.answers = False
            return
        finally:
            self._note_end()
        self.answers = True
        self._num_others = max(0, status.load.running + status.load.waiting - held)

    def generate(
        self, request: pb.TokenRequest, timeout_s: float | None, metadata: Metadata = ()
    ) -> TargetCall:
        """Start a call. `timeout_s` is the client's remaining time."""
        self._num_calls += 1
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return TargetCall(call, self._note_end)

    def _note_end(self) -> None:
        self._num_calls -= 1
        self._ended.set()

    async def _follow_forever(self) -> None:
        while True:
            try:
                await self._follow()
                self._lost("the health stream ended")
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                refusal = explain_refusal(details, self._tls, self._server_name)
                # Who refuses TLS is there. Without TLS one that hangs up may just have gone.
                refused = self._tls is not None and bool(refusal)
                away = error.code() is grpc.StatusCode.UNAVAILABLE and not refused
                self._lost(f"{error.code().name}: {refusal or details}", away=away)
            except Exception as error:  # whatever it is, the target must not go unwatched for ever
                log.exception("following a target failed", address=self.address)
                self._lost(f"unexpected {type(error).__name__}: {error}")
            # Many gateways must not come back in step.
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
            if not self._num_calls:
                # A new channel tries at once, with TLS files as they are now; the old one waits up
                # to two seconds between attempts.
                await self._channel.close(None)
                self._connect()

    async def _follow(self) -> None:
        watch = self._health.Watch(health_pb2.HealthCheckRequest(service=_SERVICE))
        try:
            async for health in watch:
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    request = pb.TargetGetStatusRequest()
                    self._judge(await self._stub.GetStatus(request, timeout=_STATUS_TIMEOUT_S))
                else:
                    name = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
                    self._lost(f"its health is {name}")
        finally:
            watch.cancel()

    def _judge(self, status: pb.TargetGetStatusResponse) -> None:
        theirs, ours = status.token_table_hash, self._token_table_hash
        if theirs and theirs != ours:
            self._lost(
                f"its token table {theirs.hex()[:16]} is not the gateway's {ours.hex()[:16]}: "
                "they serve different models"
            )
            return
        self.info = TargetInfo(
            max_model_len=status.max_model_len,
            max_draft_tokens=status.max_draft_tokens,
            eos_token_ids=frozenset(status.eos_token_ids),
            weights_fingerprint=status.weights_fingerprint,
            numerics_id=status.numerics_id,
        )
        self.reason, self.answers = "", True
        self._expected_by, self._told = 0.0, ""
        self._num_others = max(0, status.load.running + status.load.waiting - self.num_held)
        log.info("target is ready", address=self.address, instance=status.instance_id)
        self._on_change()

    def _lost(self, reason: str, *, away: bool = False) -> None:
        """away: nobody was reached."""
        told = _WAITING if away and time.monotonic() < self._expected_by else reason
        if told != self._told:
            self._told = told
            if told is _WAITING:
                log.info(_WAITING, address=self.address)
            else:
                log.warning("target is not ready", address=self.address, reason=reason)
        was_ready = self.info is not None
        self.info, self.reason = None, reason
        if was_ready:
            self._on_change()


def to_token_request(
    checked: CheckedRequest, prompt_ids: Sequence[int], cache_salt: bytes
) -> pb.TokenRequest:
    """What a target sees of a request: ids and settings, no text and no stop strings."""
    answer = checked.params.answer
    return pb.TokenRequest(
        request_id=checked.request_id,
        token_ids=prompt_ids,
        sampling=wire.sampling_to_proto(checked.params.sampling),
        stopping=wire.stopping_to_proto(checked.params.stopping),
        speculation=wire.speculation_to_proto(checked.params.speculation),
        logprobs=answer.logprobs,
        prompt_logprobs=answer.prompt_logprobs,
        n=answer.n,
        priority=checked.priority,
        cache_salt=cache_salt,
    )


def _to_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """The target's refusal as ours, with its field or delay; its loss as UNAVAILABLE."""
    code, message = error.code(), error.details() or ""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidRequest(violation.field, violation.description)
        if detail.Unpack(retry):
            return Overloaded(message, retry.retry_delay.ToNanoseconds() / 1e9)
    # CANCELLED comes from a target that shuts down: our own cancellations raise CancelledError.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(f"the target was lost: {message}")
    return TargetFailed(code, message)
