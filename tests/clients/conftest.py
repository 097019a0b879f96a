"""The three services as processes, with a tiny random model, for clients that we did not write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings
from tests.support.tiny_models import make_tiny_model


@dataclass(frozen=True)
class Addresses:
    """Where the gateway is."""

    grpc: str
    http: str
    """As clients of OpenAI's API want it."""
    model: str
    """Its name there."""
    folder: Path
    """Of the model's files."""


@pytest.fixture(scope="package")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A gateway in front of a target that uses an n-gram drafter."""
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    grpc, http, target, draft = free_ports(4)
    stack = Stack(lambda service, line: None)
    try:
        stack.start("draft", DraftSettings(port=draft, metrics_port=0))
        stack.start(
            "target",
            TargetSettings(
                port=target,
                metrics_port=0,
                model=str(model),
                threads=1,
                drafters=f"127.0.0.1:{draft}",
            ),
        )
        stack.wait_healthy(["draft", "target"], timeout_s=60)
        stack.start(
            "gateway",
            GatewaySettings(
                port=grpc,
                http_port=http,
                metrics_port=0,
                model=str(model),
                targets=f"127.0.0.1:{target}",
            ),
        )
        stack.wait_healthy(["gateway"], timeout_s=30)
        yield Addresses(f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}/v1", model.name, model)
        assert stack.stop() == {"gateway": 0, "target": 0, "draft": 0}
    finally:
        stack.kill()


@pytest.fixture(scope="package")
def gateway_address(gateway: Addresses) -> str:
    """Of gRPC."""
    return gateway.grpc
