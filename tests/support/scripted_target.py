"""A target without a model: streams the ids that a test tells it, the way the test tells it to.

It ends an answer as a target does, at max_tokens, at a stop token or at the end of the script, and
it counts what was asked and cancelled. Resumed tokens count as sent. Knows nothing of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.serving.channel import server_options
from outrider.serving.errors import OutriderError
from outrider.serving.interceptors import ErrorInterceptor
from outrider.serving.tls import ServerTls, server_credentials
from protos.outrider.v1 import sampling_pb2, target_pb2, target_pb2_grpc

SERVICE = target_pb2.DESCRIPTOR.services_by_name["Target"].full_name


@dataclass
class Script:
    """What the target answers; the same to every request."""

    ids: Sequence[int] = ()
    """The tokens, if nothing ends the answer earlier."""
    block: int = 1
    """Tokens a chunk; all but the last of a chunk are marked as drafted."""
    delay_s: float = 0.0
    """Wait before each chunk."""
    eos_ids: Sequence[int] = ()
    """End the answer unless ignore_eos is set."""
    refuse: OutriderError | None = None
    """Raised instead of an answer."""
    fail_after: int | None = None
    """Tokens after which the answer ends with `failure`."""
    failure: OutriderError | None = None
    """What it ends with; None: the stream just ends, without a finish."""
    hang_after: int | None = None
    """Tokens after which nothing comes any more."""
    hang_status: bool = False
    """GetStatus never answers."""
    first_index_shift: int = 0
    """Added to first_index from the second chunk on."""
    every_choice: bool = False
    """Play it for each of the n choices, one after the other; else for the first alone."""
    gate: asyncio.Event | None = None
    """Waited for before the first chunk."""


@dataclass
class Seen:
    """What the target noticed."""

    requests: list[target_pb2.TokenRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    """Of each request."""
    time_remaining_s: list[float | None] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    finished: int = 0
    tokens_sent: int = 0


class _EndsEarly(Exception):
    """The stream ends without a finish."""


class ScriptedTarget(target_pb2_grpc.TargetServicer):
    """The servicer; `serving` puts it on a port."""

    def __init__(self, script: Script, status: target_pb2.TargetGetStatusResponse) -> None:
        self.script = script
        self.status = status
        self.seen = Seen()
        self.address = ""
        self.health = health.aio.HealthServicer()
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options())

    async def set_serving(self, serving: bool) -> None:
        """Say SERVING or NOT_SERVING."""
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self.health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self) -> None:
        """Die now: open calls are cut."""
        await self.server.stop(0)

    async def Generate(
        self, request: target_pb2.TokenRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.TokenChunk]:
        """Plays the script."""
        script, seen = self.script, self.seen
        seen.requests.append(request)
        seen.metadata.append(dict(context.invocation_metadata()))
        seen.time_remaining_s.append(context.time_remaining())
        if script.refuse is not None:
            raise script.refuse
        seen.running += 1
        done = False
        # The handler of a cancelled call may stay suspended in a yield; this runs in any case.
        context.add_done_callback(lambda _: self._ended(done))
        if script.gate is not None:
            await script.gate.wait()
        try:
            for choice in range(max(1, request.n) if script.every_choice else 1):
                async for chunk in self._play(request, choice):
                    yield chunk
                    seen.tokens_sent += len(chunk.tokens)
        except _EndsEarly:
            return
        done = True

    async def _play(
        self, request: target_pb2.TokenRequest, choice: int
    ) -> AsyncIterator[target_pb2.TokenChunk]:
        """The chunks of one choice."""
        script = self.script
        ids, reason = self._answer(request)
        sent = len(request.resumed_token_ids)
        while sent < len(ids):
            await asyncio.sleep(script.delay_s)
            if script.hang_after is not None and sent >= script.hang_after:
                await asyncio.Event().wait()
            if script.fail_after is not None and sent >= script.fail_after:
                raise script.failure or _EndsEarly
            block = ids[sent : sent + script.block]
            is_last = sent + len(block) == len(ids)
            yield self._chunk(request, choice, block, sent, reason if is_last else None)
            sent += len(block)

    async def GetStatus(
        self, request: target_pb2.TargetGetStatusRequest, context: grpc.aio.ServicerContext
    ) -> target_pb2.TargetGetStatusResponse:
        """The status that the test gave."""
        if self.script.hang_status:
            await asyncio.Event().wait()
        return self.status

    def _ended(self, done: bool) -> None:
        self.seen.running -= 1
        if done:
            self.seen.finished += 1
        else:
            self.seen.cancelled += 1

    def _answer(
        self, request: target_pb2.TokenRequest
    ) -> tuple[list[int], sampling_pb2.FinishReason]:
        stopping = request.stopping
        stops = set(stopping.stop_token_ids)
        if not stopping.ignore_eos:
            stops |= set(self.script.eos_ids)
        taken = []
        for token_id in self.script.ids:
            taken.append(token_id)
            if token_id in stops:
                return taken, sampling_pb2.FINISH_REASON_STOP
            if len(taken) == stopping.max_tokens:
                break
        return taken, sampling_pb2.FINISH_REASON_LENGTH

    def _chunk(
        self,
        request: target_pb2.TokenRequest,
        choice: int,
        block: Sequence[int],
        sent: int,
        reason: sampling_pb2.FinishReason | None,
    ) -> target_pb2.TokenChunk:
        shift = self.script.first_index_shift if sent else 0
        chunk = target_pb2.TokenChunk(
            index=choice,
            first_index=sent + shift,
            tokens=[
                sampling_pb2.GeneratedToken(id=token_id, drafted=index < len(block) - 1)
                for index, token_id in enumerate(block)
            ],
            speculation=self._stats(sent + len(block) - len(request.resumed_token_ids)),
        )
        if reason is not None:
            usage = sampling_pb2.Usage(
                prompt_tokens=len(request.token_ids), completion_tokens=sent + len(block)
            )
            chunk.finish.CopyFrom(
                target_pb2.TokenFinish(reason=reason, usage=usage, speculation=chunk.speculation)
            )
        return chunk

    def _stats(self, num_tokens: int) -> sampling_pb2.SpeculationStats:
        """As if every draft had been accepted, `block - 1` a round."""
        block = self.script.block
        full, rest = divmod(num_tokens, block)
        per_position = [full + (position < rest - 1) for position in range(block - 1)]
        accepted = sum(per_position)
        return sampling_pb2.SpeculationStats(
            rounds=(full + (rest > 1)) if block > 1 else 0,
            drafted=accepted,
            accepted=accepted,
            accepted_per_position=[count for count in per_position if count],
            plain_steps=full if block == 1 else int(rest == 1),
        )


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    status: target_pb2.TargetGetStatusResponse,
    *,
    port: int = 0,
    tls: ServerTls | None = None,
) -> AsyncIterator[ScriptedTarget]:
    """A scripted target on a loopback port, healthy from the start."""
    target = ScriptedTarget(script, status)
    server = target.server
    target_pb2_grpc.add_TargetServicer_to_server(target, server)
    health_pb2_grpc.add_HealthServicer_to_server(target.health, server)
    if tls is None:
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        bound = server.add_secure_port(f"127.0.0.1:{port}", server_credentials(tls))
    target.address = f"127.0.0.1:{bound}"
    await target.set_serving(True)
    await server.start()
    try:
        yield target
    finally:
        await server.stop(0)
