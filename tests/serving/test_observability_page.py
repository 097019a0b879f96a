"""The page on metrics names every one that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draft_service.service import DraftService
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings
from tests.support.gateways import gateway_on
from tests.support.in_process import HOST, running_target
from tests.support.stacks import ask
from tests.support.tiny_models import make_tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
NOT_EVERYWHERE = {"outrider_energy_joules"}
"""What only some machines can tell."""


@pytest.mark.timeout(90)
async def test_the_page_names_the_metrics_of_all_services(tmp_path: Path) -> None:
    """Once each has answered something."""
    model = make_tiny_model(tmp_path / "tiny")
    draft = DraftService(DraftSettings(port=0))
    async with (
        listening(draft, HOST, 0) as drafter,
        running_target(model, f"{HOST}:{drafter.port}") as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        await ask(gateway, "one river runs", k=4, max_tokens=20)
        services = (gateway.service, target.service, draft)
        there = {family.name for each in services for family in each.registry.collect()}
    ours = {name for name in there if name.startswith("outrider_")}
    named = {
        name.removesuffix("_total") for name in re.findall(r"`(outrider_\w+)", PAGE.read_text())
    }
    assert ours - named == set(), "not on the page"
    assert named - ours - NOT_EVERYWHERE == set(), "on the page only"


def test_the_page_names_the_default_ports() -> None:
    """As the settings have them."""
    ports = [each().metrics_port for each in (GatewaySettings, TargetSettings, DraftSettings)]
    assert f"| port (`metrics_port`) | {' | '.join(map(str, ports))} |" in PAGE.read_text()
