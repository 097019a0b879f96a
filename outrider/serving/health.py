"""What a service says of itself over grpc.health.v1, under three kinds of names, and to `admin.py`.

    ""                       ready: it takes requests now
    "outrider.v1.Target" …   the same, by the service's full name
    "liveness"               alive: only a restart helps a process that is not

A draining service is alive and not ready; a gateway without targets is too; an engine that is dead
is neither. Drafts are optional and so never count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from grpc_health.v1 import health, health_pb2

LIVENESS = "liveness"
"""The name to ask for in a liveness probe; it is no service of protobuf."""

_HealthServicer: Any = health.aio.HealthServicer  # type: ignore[attr-defined]  # not in the stubs
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class SetHealthy(Protocol):
    """How a service tells that its state has changed."""

    def __call__(self, healthy: bool, *, alive: bool = True) -> None:
        """Ready or not. Once it is not alive it never is again."""


class Health:
    """Ready and alive once it has started, until it is told otherwise."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.servicer = _HealthServicer()
        self.started = False
        """Nobody can ask over gRPC before; others can."""
        self._names = ("", *service_names)
        self._healthy = self._alive = True
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        """A restart would not help."""
        return self._alive

    @property
    def ready(self) -> bool:
        """It takes requests now."""
        return self.started and self._serves

    @property
    def state(self) -> str:
        """One word for people."""
        if not self._alive:
            return "dead"
        if not self.started:
            return "starting"
        return "draining" if self._draining else "ready" if self._healthy else "unready"

    @property
    def _serves(self) -> bool:
        return self._healthy and self._alive and not self._draining

    def set(self, healthy: bool, *, alive: bool = True) -> None:
        """Take in a new state; watchers are told soon."""
        self._healthy = healthy
        self._alive = self._alive and alive
        task = asyncio.create_task(self.publish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """No longer ready, whatever comes."""
        self._draining = True
        await self.publish()

    async def publish(self) -> None:
        """Tell everybody who asks or watches."""
        for name in self._names:
            # Read anew each time: it may have changed while a watcher was told.
            await self.servicer.set(name, _SERVING if self._serves else _NOT_SERVING)
        await self.servicer.set(LIVENESS, _SERVING if self._alive else _NOT_SERVING)
