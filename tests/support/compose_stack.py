"""The compose stack with a project name, images and a port of the test's own: `ComposeStack`.

The services alone (compose.apps.yaml), with short grace times so that a drain can be watched.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.demo import free_ports
from tests.support.docker_engine import Engine

GRACE_S = 8
_FOLDER = Path(__file__).resolve().parents[2] / "compose"
_BUILD_S = 2400
_OVERRIDE = f"""
services:
  gateway: {{environment: {{OUTRIDER_GATEWAY_GRACE_S: "{GRACE_S}"}}}}
  target: {{environment: {{OUTRIDER_TARGET_GRACE_S: "{GRACE_S}"}}}}
"""


@dataclass(frozen=True)
class Container:
    """One container as the engine knows it."""

    id: str
    name: str
    address: str
    """On the inside network; this machine reaches it, as it holds the bridge."""
    restarts: int


class ComposeStack:
    """The services of compose/, under a project of the test's own."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.project = f"outrider-test-{uuid.uuid4().hex[:8]}"
        self.port, self.http_port = free_ports(2)
        override = folder / "compose.test.yaml"
        override.write_text(_OVERRIDE)
        files = [_FOLDER / "compose.yaml", _FOLDER / "compose.apps.yaml", override]
        self._words = ["--project-name", self.project, "--project-directory", str(_FOLDER)]
        self._words += [word for file in files for word in ("--file", str(file))]

    @property
    def address(self) -> str:
        """The gateway as clients outside reach it."""
        return f"127.0.0.1:{self.port}"

    @property
    def http_address(self) -> str:
        """The same for OpenAI's API."""
        return f"127.0.0.1:{self.http_port}"

    def compose(self, *words: str, timeout_s: float = 300) -> str:
        """`docker compose WORDS` for this project."""
        return self.engine.compose(
            *self._words,
            *words,
            timeout_s=timeout_s,
            TAG=self.project,
            PUBLISH=self.address,
            PUBLISH_HTTP=self.http_address,
        )

    def build(self) -> None:
        """All images, from the working tree."""
        self.compose("build", timeout_s=_BUILD_S)

    def image(self, name: str) -> str:
        """An image of this project, such as `target`."""
        return f"outrider-{name}:{self.project}"

    def containers(self, service: str) -> list[Container]:
        """The running ones of a service."""
        ids = self.compose("ps", "--quiet", service).split()
        found = json.loads(self.engine.docker("inspect", *ids)) if ids else []
        return [
            Container(
                id=each["Id"],
                name=each["Name"].removeprefix("/"),
                address=each["NetworkSettings"]["Networks"][f"{self.project}_inside"]["IPAddress"],
                restarts=each["RestartCount"],
            )
            for each in found
            if each["State"]["Running"]
        ]

    def exit_codes_since(self, moment: str) -> dict[str, list[int]]:
        """How containers of each service have ended since a time that the engine said."""
        words = ["events", "--since", moment, "--until", self.now(), "--filter", "event=die"]
        words += ["--filter", f"label=com.docker.compose.project={self.project}"]
        codes: dict[str, list[int]] = {}
        for line in self.engine.docker(*words, "--format", "{{json .}}").splitlines():
            attributes = json.loads(line)["Actor"]["Attributes"]
            service = attributes["com.docker.compose.service"]
            codes.setdefault(service, []).append(int(attributes["exitCode"]))
        return codes

    def now(self) -> str:
        """The engine's clock."""
        return self.engine.docker("info", "--format", "{{.SystemTime}}").strip()

    def remove(self) -> None:
        """Everything that the project has in the engine."""
        self.compose("down", "--volumes", "--rmi", "all", "--timeout", "1", "--remove-orphans")
