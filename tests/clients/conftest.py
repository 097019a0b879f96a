"""The three services as processes, with a tiny random model, for clients that we did not write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="package")
def gateway_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in front of a target that uses an n-gram drafter."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))
    gateway, target, draft = free_ports(3)
    stack = Stack(lambda service, line: None)
    try:
        stack.start("draft", DraftSettings(port=draft, metrics_port=0))
        stack.start(
            "target",
            TargetSettings(
                port=target,
                metrics_port=0,
                model=model,
                threads=1,
                drafters=f"127.0.0.1:{draft}",
            ),
        )
        stack.wait_healthy(["draft", "target"], timeout_s=60)
        stack.start(
            "gateway",
            GatewaySettings(
                port=gateway,
                http_port=0,
                metrics_port=0,
                model=model,
                targets=f"127.0.0.1:{target}",
            ),
        )
        stack.wait_healthy(["gateway"], timeout_s=30)
        yield f"127.0.0.1:{gateway}"
        assert stack.stop() == {"gateway": 0, "target": 0, "draft": 0}
    finally:
        stack.kill()
