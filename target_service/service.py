"""Puts the target together and gives it its life: load, warm, serve, drain, free."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Sequence

import grpc
import structlog

from outrider.engine.block_pool import BLOCK_SIZE, BlockPool
from outrider.engine.device import free_bytes
from outrider.engine.fingerprints import token_table_hash
from outrider.engine.memory import PoolSize
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import numerics_id, prepare_cpu
from outrider.engine.runner import Runner
from outrider.models.resolve import display_name, resolve
from outrider.serving.cores import usable_cores
from outrider.serving.device import DeviceThread
from outrider.serving.handshake import MAX_FRAME_BYTES, protocol_version
from outrider.serving.health import SetHealthy
from outrider.serving.logs import configure_logging
from outrider.serving.memory import give_back_memory
from outrider.serving.metrics import make_registry
from outrider.serving.server import run as run_loop
from outrider.serving.server import serve
from outrider.serving.settings import SettingsError, TargetSettings, split_addresses
from outrider.serving.tls_settings import client_tls, server_tls
from outrider.serving.tracing import Tracing
from outrider_kernels.version import NOISE_VERSION
from protos.outrider.v1 import draft_pb2, target_pb2_grpc
from target_service.admission import Door, Limits
from target_service.batcher import Batcher
from target_service.draft_hub import DraftHub
from target_service.draft_tail import DraftTotals
from target_service.message_sizes import check_message_limit
from target_service.metrics import TargetMetrics
from target_service.observer import Observer
from target_service.scheduler import Scheduler
from target_service.servicer import TargetServicer
from target_service.status import Identity, StatusReporter
from target_service.verifier import Verifier
from target_service.window import StepCost

log = structlog.get_logger(__name__)

_SWITCH_S = 0.0001
"""How long the device thread waits for Python while the event loop writes streams. By Python's own
5 ms a step of many streams would begin as much later."""


class TargetService:
    """The target as `outrider.serving.server.serve` wants it."""

    service_names: Sequence[str] = ("outrider.v1.Target",)

    def __init__(self, settings: TargetSettings, tracing: Tracing | None = None) -> None:
        """tracing: None for none."""
        self._settings = settings
        self._tracing = tracing or Tracing.disabled()
        self.registry = make_registry("target", self._tracing)
        self._observer = Observer(self.registry, self._tracing)
        self._metrics = TargetMetrics(
            self.registry, self._observer, settings.max_draft_tokens, settings.device
        )
        self.tls = server_tls(settings)
        self._client_tls = client_tls(settings)
        self._device = DeviceThread("target-device")
        self._hub: DraftHub | None = None
        self.batcher: Batcher | None = None
        self._servicer: TargetServicer | None = None

    @property
    def max_message_bytes(self) -> int:
        """Limit of the server."""
        return self._settings.max_message_bytes

    async def start(self, set_healthy: SetHealthy) -> None:
        """Load the model, then begin to run steps and to look for drafters."""
        settings = self._settings
        if settings.max_window < settings.max_draft_tokens:
            raise SettingsError("max_window must be at least max_draft_tokens")
        sys.setswitchinterval(_SWITCH_S)
        runner, identity = await self._device.run(self._load)
        self._device.call_timeout_s = settings.step_timeout_s
        model, num_blocks = runner.model.config, runner.cache.num_blocks
        limits = self._limits(model.max_model_len, num_blocks)
        check_message_limit(
            settings.max_message_bytes,
            max_model_len=limits.max_model_len,
            step_tokens=settings.step_tokens,
            max_draft_tokens=settings.max_draft_tokens,
        )
        cost, drafts = StepCost(), DraftTotals()
        wake, arrived = asyncio.Event(), asyncio.Event()
        hello = self._hello(identity, model.vocab_size, limits)
        self._hub = DraftHub(
            split_addresses(settings.drafters),
            hello,
            arrived.set,
            totals=drafts,
            observer=self._observer,
            tls=self._client_tls,
        )
        self.batcher = Batcher(
            Scheduler(
                BlockPool(num_blocks, BLOCK_SIZE),
                max_sequences=settings.max_sequences,
                step_tokens=settings.step_tokens,
                max_waiting=settings.max_waiting,
                prefix_cache=settings.prefix_cache,
            ),
            self._hub,
            Verifier(runner).run,
            device=self._device,
            cost=cost,
            wake=wake,
            arrived=arrived,
            on_dead=lambda: set_healthy(False, alive=False),
            observer=self._observer,
        )
        self._metrics.attach(self.batcher, self._hub, drafts)
        self._servicer = TargetServicer(
            Door(model, limits, cost, drafts),
            self.batcher,
            StatusReporter(
                identity, model, limits, self.batcher, self._hub, drafts, settings.max_waiting
            ),
            self._observer,
            model=identity.model_name,
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

    def _load(self) -> tuple[Runner, Identity]:
        settings, begin_s = self._settings, time.monotonic()
        folder = resolve(settings.model)
        prepare_cpu(settings.threads or usable_cores())
        model = LlamaModel.load(
            folder, settings.dtype, settings.device, settings.kernels, settings.kv_dtype
        )
        model.set_spin(settings.spin_us)
        size = PoolSize(
            settings.kv_tokens, settings.kv_blocks, settings.kv_bytes, settings.kv_fraction
        )
        each = model.block_bytes(BLOCK_SIZE)
        num_blocks = size.num_blocks(each, BLOCK_SIZE, free_bytes(model.device))
        loaded_s = time.monotonic()
        graph_rows = min(settings.graph_rows, settings.step_tokens)
        runner = Runner(model, num_blocks, BLOCK_SIZE, graph_rows=graph_rows)
        runner.warm(str(folder))
        identity = Identity(
            model_name=display_name(settings.model),
            instance_id=uuid.uuid4().hex,
            token_table_hash=token_table_hash(folder),
            weights_fingerprint=model.weights_fingerprint,
            numerics_id=numerics_id(model),
            precision=model.precision,
            kv_dtype=model.kv_dtype,
            block_bytes=runner.cache.block_bytes,
        )
        give_back_memory()
        log.info(
            "model loaded",
            model=identity.model_name,
            precision=identity.precision,
            kv_dtype=identity.kv_dtype,
            kv_tokens=num_blocks * BLOCK_SIZE,
            kv_mib=round(num_blocks * each / 2**20),
            load_s=round(loaded_s - begin_s, 2),
            warm_s=round(time.monotonic() - loaded_s, 2),
        )
        return runner, identity

    def _limits(self, model_len: int, num_blocks: int) -> Limits:
        settings = self._settings
        longest = min(model_len, num_blocks * BLOCK_SIZE)
        if settings.max_model_len:
            longest = min(longest, settings.max_model_len)
        return Limits(
            max_model_len=longest,
            block_size=BLOCK_SIZE,
            max_requests=settings.max_sequences + settings.max_waiting,
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
    tracing = Tracing.from_environment("target", step_spans=settings.trace_steps)
    service = TargetService(settings, tracing)
    run_loop(lambda: serve(service, settings, tracing))
