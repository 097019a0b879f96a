"""Puts the target together and gives it its life: load, warm, serve, drain, free."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import structlog

from outrider.engine.block_pool import BlockPool
from outrider.engine.fingerprints import token_table_hash, weights_fingerprint
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import numerics_id, prepare_cpu
from outrider.engine.runner import Runner
from outrider.models.store import resolve
from outrider.serving.device import DeviceThread
from outrider.serving.handshake import MAX_FRAME_BYTES, protocol_version
from outrider.serving.logs import configure_logging
from outrider.serving.server import run as run_loop
from outrider.serving.server import serve
from outrider.serving.settings import SettingsError, TargetSettings, split_addresses
from outrider_kernels.version import NOISE_VERSION
from protos.outrider.v1 import draft_pb2, target_pb2_grpc
from target_service.admission import Door, Limits
from target_service.batcher import Batcher
from target_service.draft_hub import DraftHub
from target_service.draft_tail import DraftTotals
from target_service.scheduler import Scheduler
from target_service.servicer import TargetServicer
from target_service.status import Identity, StatusReporter
from target_service.verifier import Verifier
from target_service.window import StepCost

log = structlog.get_logger(__name__)

BLOCK_SIZE = 16


class TargetService:
    """The target as `outrider.serving.server.serve` wants it."""

    service_names: Sequence[str] = ("outrider.v1.Target",)

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._device = DeviceThread("target-device")
        self._hub: DraftHub | None = None
        self.batcher: Batcher | None = None
        self._servicer: TargetServicer | None = None

    async def start(self, set_healthy: Callable[[bool], None]) -> None:
        """Load the model, then begin to run steps and to look for drafters."""
        settings = self._settings
        if settings.dtype != "float32":
            raise ValueError(f"dtype must be float32 in this version, got {settings.dtype}")
        if settings.max_window < settings.max_draft_tokens:
            raise SettingsError("max_window must be at least max_draft_tokens")
        folder = resolve(settings.model)
        num_blocks = settings.kv_tokens // BLOCK_SIZE
        runner, identity = await self._device.run(lambda: self._load(folder, num_blocks))
        model = runner.model.config
        limits = self._limits(model.max_model_len)
        cost, drafts = StepCost(), DraftTotals()
        wake, arrived = asyncio.Event(), asyncio.Event()
        hello = self._hello(identity, model.vocab_size, limits)
        self._hub = DraftHub(split_addresses(settings.drafters), hello, arrived.set)
        self.batcher = Batcher(
            Scheduler(
                BlockPool(num_blocks, BLOCK_SIZE),
                max_sequences=settings.max_sequences,
                step_tokens=settings.step_tokens,
                max_waiting=settings.max_waiting,
            ),
            self._hub,
            Verifier(runner).run,
            device=self._device,
            cost=cost,
            wake=wake,
            arrived=arrived,
            on_dead=lambda: set_healthy(False),
        )
        self._servicer = TargetServicer(
            Door(model, limits, cost, drafts),
            self.batcher,
            StatusReporter(
                identity, model, limits, self.batcher, self._hub, drafts, settings.max_waiting
            ),
            stream_tokens=settings.stream_tokens,
            stall_s=settings.stall_s,
        )
        self.batcher.start()
        self._hub.start()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        target_pb2_grpc.add_TargetServicer_to_server(self._servicer, server)

    async def drain(self) -> None:
        """Refuse new requests; the open ones go on."""
        if self.batcher is not None:
            self.batcher.drain()

    async def stop(self) -> None:
        """End what is left."""
        if self.batcher is not None:
            await self.batcher.stop()
        if self._hub is not None:
            await self._hub.stop()
        self._device.close()

    def _load(self, folder: Path, num_blocks: int) -> tuple[Runner, Identity]:
        prepare_cpu(self._settings.threads or os.cpu_count() or 1)
        model = LlamaModel.load(folder)
        runner = Runner(model, num_blocks, BLOCK_SIZE)
        identity = Identity(
            model_name=folder.name,
            instance_id=uuid.uuid4().hex,
            token_table_hash=token_table_hash(folder),
            weights_fingerprint=weights_fingerprint(folder),
            numerics_id=numerics_id(model),
        )
        log.info("model loaded", model=folder.name, kv_tokens=num_blocks * BLOCK_SIZE)
        return runner, identity

    def _limits(self, model_len: int) -> Limits:
        settings = self._settings
        longest = min(model_len, settings.kv_tokens // BLOCK_SIZE * BLOCK_SIZE)
        if settings.max_model_len:
            longest = min(longest, settings.max_model_len)
        return Limits(
            max_model_len=longest,
            max_draft_tokens=settings.max_draft_tokens,
            max_window=settings.max_window,
            draft_wait_s=settings.draft_wait_ms / 1000,
        )

    def _hello(self, identity: Identity, vocab_size: int, limits: Limits) -> draft_pb2.Hello:
        return draft_pb2.Hello(
            protocol_version=protocol_version(),
            noise_version=NOISE_VERSION,
            instance_id=identity.instance_id,
            token_table_hash=identity.token_table_hash,
            vocab_size=vocab_size,
            weights_fingerprint=identity.weights_fingerprint,
            limits=draft_pb2.Limits(
                max_sequences=self._settings.max_sequences + self._settings.max_waiting,
                max_len=limits.max_model_len,
                max_window=limits.max_window,
                max_frame_bytes=MAX_FRAME_BYTES,
            ),
        )


def run(settings: TargetSettings) -> None:
    """Serve until a signal. Raises OSError for a taken port, ModelError for an unusable model."""
    configure_logging("target", settings.log_level)
    service = TargetService(settings)
    run_loop(lambda: serve(service, settings.host, settings.port, settings.grace_s))
