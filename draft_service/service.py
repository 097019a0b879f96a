"""The draft service as a process: builds the proposer, runs the loop, ends everything in order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog

from draft_service.batch import DraftLoop
from draft_service.book import Capacity
from draft_service.metrics import DraftMetrics
from draft_service.proposers.base import Proposer
from draft_service.proposers.ngram import NgramProposer
from draft_service.record import SequenceRecords
from draft_service.servicer import DraftServicer
from outrider.serving import server
from outrider.serving.errors import EngineFailed, Unavailable
from outrider.serving.health import SetHealthy
from outrider.serving.logs import configure_logging
from outrider.serving.metrics import make_registry
from outrider.serving.settings import DraftSettings, SettingsError
from outrider.serving.tls_settings import server_tls
from outrider.serving.tracing import Tracing
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc

log = structlog.get_logger(__name__)

_MAX_TOKENS = 2**21
"""Confirmed tokens of all sequences together: with the n-gram index 0.6 GiB, 1.4 GiB with the
largest `ngram_max` (measured)."""
_LAST_WORDS_S = 1.0
"""What targets and probes get to hear of it before a process whose loop has died ends."""

ProposerFactory = Callable[[DraftSettings], Awaitable[Proposer]]


class DraftService:
    """Life of one drafter; see `outrider.serving.server.Service`."""

    service_names: Sequence[str] = (draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name,)

    def __init__(
        self,
        settings: DraftSettings,
        proposer_factory: ProposerFactory | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """tracing: None for none."""
        self._settings = settings
        self._tracing = tracing or Tracing.disabled()
        self.registry = make_registry("draft", self._tracing)
        self._metrics = DraftMetrics(self.registry, settings.device)
        self.tls = server_tls(settings)
        self._make_proposer = proposer_factory or make_proposer
        self._proposer: Proposer | None = None
        self._servicer: DraftServicer | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._set_healthy: SetHealthy | None = None
        self._dead = asyncio.Event()
        self._failure = EngineFailed("the draft loop has not failed")

    @property
    def max_message_bytes(self) -> int:
        """Limit of the server."""
        return self._settings.max_message_bytes

    async def start(self, set_healthy: SetHealthy) -> None:
        """Build the proposer, which may load a model, and begin to step."""
        settings = self._settings
        self._set_healthy = set_healthy
        self._proposer = await self._make_proposer(settings)
        identity = self._proposer.identity
        loop = DraftLoop(self._proposer, self._metrics.stepped)
        capacity = Capacity(settings.max_sequences, identity.max_len, _MAX_TOKENS)
        name = f"draft-{secrets.token_hex(4)}"
        records = SequenceRecords(identity.proposer, self._tracing, self._metrics.faults)
        self._servicer = DraftServicer(
            self._proposer,
            loop,
            capacity,
            records,
            max_window=settings.max_window,
            instance_id=name,
        )
        self._metrics.attach(self._servicer, loop, capacity, records)
        self._loop_task = asyncio.create_task(loop.run(), name="draft loop")
        self._loop_task.add_done_callback(self._on_loop_end)
        model = {}
        if identity.model:
            model = {"model": identity.model, "precision": identity.precision}
        log.info("drafting", proposer=identity.proposer, **model, instance=name)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        draft_pb2_grpc.add_DraftServicer_to_server(self._servicer, server)

    async def drain(self) -> None:
        """End every stream at once: targets go on alone, so waiting would help nobody."""
        if self._servicer is not None:
            self._servicer.refuse_all(Unavailable("the draft service is draining"))

    async def stop(self) -> None:
        """Free everything."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})  # its error, if any, has been reported
        if self._proposer is not None:
            self._proposer.shutdown()

    async def wait_dead(self) -> EngineFailed:
        """Why the loop has died, once it has."""
        await self._dead.wait()
        return self._failure

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """Without its loop the service can only say so."""
        if task.cancelled():
            return
        error = task.exception()
        log.error("the draft loop failed", exc_info=error)
        if self._set_healthy is not None:
            self._set_healthy(False, alive=False)
        self._failure = EngineFailed(f"the draft loop failed: {error}")
        if self._servicer is not None:
            self._servicer.refuse_all(self._failure)
        self._dead.set()


async def make_proposer(settings: DraftSettings) -> Proposer:
    """The proposer that the settings name."""
    if settings.proposer == "ngram":
        return NgramProposer(settings.ngram_min, settings.ngram_max)
    if settings.proposer == "model":
        # Torch is loaded only for those who use it.
        from draft_service.proposers.model import ModelProposer

        return await ModelProposer.load(settings)
    raise SettingsError(f"proposer must be ngram or model, got {settings.proposer!r}")


async def serve(service: DraftService, settings: DraftSettings, tracing: Tracing) -> None:
    """As `server.serve`. Raises EngineFailed when the loop dies: a supervisor can start anew."""
    serving = asyncio.create_task(server.serve(service, settings, tracing))
    dying = asyncio.create_task(service.wait_dead())
    await asyncio.wait({serving, dying}, return_when=asyncio.FIRST_COMPLETED)
    if not dying.done():
        dying.cancel()
        await serving
        return
    await asyncio.wait({serving}, timeout=_LAST_WORDS_S)
    serving.cancel()
    await asyncio.wait({serving})
    raise dying.result()


def run(settings: DraftSettings, proposer_factory: ProposerFactory | None = None) -> None:
    """The whole process. Raises EngineFailed when it cannot draft any more."""
    configure_logging("draft", settings.log_level)
    tracing = Tracing.from_environment("draft")
    service = DraftService(settings, proposer_factory, tracing)
    server.run(lambda: serve(service, settings, tracing))
