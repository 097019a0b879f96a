"""A gateway with an HTTP port in front of a real target, inside the test's event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from draft_service.service import DraftService
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from tests.support.gateways import gateway_on
from tests.support.http_gateway import HOST, HttpGateway
from tests.support.in_process import Target, running_target
from tests.support.token_requests import wait_for_drafters


@contextlib.asynccontextmanager
async def http_stack(
    model: Path, drafters: str = "", **target_settings: object
) -> AsyncIterator[tuple[HttpGateway, Target]]:
    """Both are ready, and so are the drafters at these addresses."""
    async with (
        running_target(model, drafters, **target_settings) as target,
        gateway_on(model, [target.address], http_port=0) as gateway,
        contextlib.AsyncExitStack() as clients,
    ):
        await gateway.wait_health(True)
        await wait_for_drafters(target)
        yield HttpGateway(gateway, None, clients), target


@contextlib.asynccontextmanager
async def full_http_stack(
    model: Path, **target_settings: object
) -> AsyncIterator[tuple[HttpGateway, Target]]:
    """The same with an n-gram drafter beside the target."""
    async with (
        listening(DraftService(DraftSettings(port=0)), HOST, 0) as draft,
        http_stack(model, f"{HOST}:{draft.port}", **target_settings) as stack,
    ):
        yield stack
