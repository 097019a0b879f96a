"""The gateway as a process: loads the tokenizer, listens, follows its targets.

Healthy while at least one target is ready. A target that is away, or that serves another model,
makes the gateway NOT_SERVING, and requests are answered UNAVAILABLE with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import structlog

from gateway.admission import Admission
from gateway.http.app import HttpApp
from gateway.http.server import HttpServer, serving_http
from gateway.inference import Inference, Limits, ServedModel
from gateway.key_file import KeyFile
from gateway.metrics import GatewayMetrics
from gateway.record import RequestRecords
from gateway.requests import TokenCaps
from gateway.routing import TargetPool
from gateway.servicer import InferenceServicer
from gateway.tokenizer import ModelTokenizer
from outrider.engine.fingerprints import token_table_hash
from outrider.models.resolve import display_name, resolve
from outrider.serving.device import DeviceThread
from outrider.serving.health import Health, SetHealthy
from outrider.serving.logs import configure_logging
from outrider.serving.memory import give_back_memory
from outrider.serving.metrics import make_registry
from outrider.serving.open_calls import OpenCalls
from outrider.serving.server import run as run_loop
from outrider.serving.server import serve
from outrider.serving.settings import GatewaySettings, SettingsError, split_addresses
from outrider.serving.tls import ssl_context
from outrider.serving.tls_settings import client_tls, is_loopback, server_tls
from outrider.serving.tracing import Tracing
from outrider.serving.unread import UnreadStreams
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc

log = structlog.get_logger(__name__)

_SETTINGS_BYTES = 128 * 1024
"""Everything of a request but its prompt: stop strings, a full bias map, names."""


class GatewayService:
    """Implements outrider.serving.server.Service."""

    service_names: Sequence[str] = (pb.DESCRIPTOR.services_by_name["Inference"].full_name,)

    def __init__(self, settings: GatewaySettings, tracing: Tracing | None = None) -> None:
        """tracing: None for none."""
        self._settings = settings
        self._tracing = tracing or Tracing.disabled()
        self.registry = make_registry("gateway", self._tracing)
        self._metrics = GatewayMetrics(self.registry, self._target_states)
        self._targets: TargetPool | None = None
        self._inference: Inference | None = None
        self._http: HttpServer | None = None
        self._following: asyncio.Task[None] | None = None
        self._unread = UnreadStreams(settings.stall_s)
        self.tls = server_tls(settings)
        self._client_tls = client_tls(settings)
        self._addresses = split_addresses(settings.targets)
        if not self._addresses:
            raise SettingsError("targets must name at least one address")
        if settings.max_prompt_bytes + _SETTINGS_BYTES > settings.max_message_bytes:
            raise SettingsError(
                f"max_message_bytes must be at least max_prompt_bytes and {_SETTINGS_BYTES} more, "
                f"{settings.max_prompt_bytes + _SETTINGS_BYTES}, got {settings.max_message_bytes}"
            )

    @property
    def max_message_bytes(self) -> int:
        """Limit of the server."""
        return self._settings.max_message_bytes

    async def start(self, set_healthy: SetHealthy) -> None:
        """Load the tokenizer and begin to look for the targets, which need not be up."""
        settings = self._settings
        # On a thread that keeps no process alive, so that a signal ends the start.
        loading = DeviceThread("gateway-loading")
        try:
            folder, tokenizer, token_table = await loading.run(self._load)
        finally:
            loading.close()
        name = settings.served_name or display_name(settings.model)
        self._targets = TargetPool(
            self._addresses,
            token_table,
            set_healthy,
            max_message_bytes=settings.max_message_bytes,
            tls=self._client_tls,
        )
        self._inference = Inference(
            ServedModel(name, tokenizer),
            self._targets,
            RequestRecords(name, self._metrics, self._tracing, log_text=settings.log_text),
            self._admission(),
            Limits(
                max_prompt_bytes=settings.max_prompt_bytes,
                max_message_bytes=settings.max_message_bytes,
                default_timeout_s=settings.default_timeout_s,
                max_timeout_s=settings.request_timeout_s,
                caps=TokenCaps(settings.default_max_tokens, settings.max_tokens),
            ),
        )
        set_healthy(False)
        self._targets.start()
        log.info("tokenizer is loaded", model=name, folder=str(folder))

    def _admission(self) -> Admission:
        settings = self._settings
        file = KeyFile(Path(settings.api_keys)) if settings.api_keys else None
        keys = file.load() if file else None
        admission = Admission(max_concurrent=settings.max_concurrent, keys=keys)
        if file:
            self._following = asyncio.create_task(file.follow(admission.take_keys), name="api keys")
        return admission

    def _load(self) -> tuple[Path, ModelTokenizer, bytes]:
        folder = resolve(self._settings.model, weights=False)
        loaded = folder, ModelTokenizer.load(folder), token_table_hash(folder)
        give_back_memory()
        return loaded

    def register(self, server: grpc.aio.Server) -> None:
        """Add the Inference service."""
        assert self._inference is not None
        servicer = InferenceServicer(self._inference, self._unread)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)

    @contextlib.asynccontextmanager
    async def serving_http(self, health: Health, calls: OpenCalls) -> AsyncIterator[int]:
        """OpenAI's API, unless the setting says none."""
        settings = self._settings
        if settings.http_port < 0:
            yield 0
            return
        assert self._inference is not None
        app = HttpApp(
            self._inference,
            health,
            calls,
            max_body_bytes=settings.max_message_bytes,
            stall_s=settings.stall_s,
        )
        tls = ssl_context(self.tls) if self.tls else None
        if tls is None and not is_loopback(settings.http_host):
            log.warning("other machines can reach the HTTP port, and it has no TLS")
        host, port = settings.http_host, settings.http_port
        front = serving_http(app, host, port, totals=self._metrics.totals.http, tls=tls)
        with contextlib.closing(app):
            async with front as server:
                self._http = server
                yield server.port

    async def drain(self) -> None:
        """Refuse new requests; running ones end by themselves or with the grace time."""
        assert self._inference is not None
        self._inference.drain()
        if self._http is not None:
            self._http.drain()

    async def stop(self) -> None:
        """Cut the connections to the targets."""
        if self._following is not None:
            self._following.cancel()
        if self._targets is not None:
            await self._targets.close()
        if self._inference is not None:
            self._inference.close()

    def _target_states(self) -> dict[str, int]:
        return self._targets.states if self._targets else {"ready": 0, "unready": 0}


def run(settings: GatewaySettings) -> None:
    """Serve until a signal. Raises what a bad setting or model folder raises."""
    configure_logging("gateway", settings.log_level)
    tracing = Tracing.from_environment("gateway")
    service = GatewayService(settings, tracing)
    run_loop(lambda: serve(service, settings, tracing))
