"""The Dockerfile: what it copies is let in, and what it makes is unprivileged and probed."""

from __future__ import annotations

import http.server
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli.options import SERVICES
from outrider_kernels.native_build import BEFOREHAND

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "compose" / "Dockerfile").read_text()
READY = ROOT / "compose" / "ready.py"
SERVICE_OF = {"gateway": "gateway", "target": "target", "draft": "draft", "draft-ngram": "draft"}


def stages() -> dict[str, tuple[str, str]]:
    """Each stage's name, with what it is from and its text."""
    found = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.M)[1:]
    return {
        name: (parent, text)
        for parent, name, text in zip(found[::3], found[1::3], found[2::3], strict=True)
    }


def copied_from_context() -> list[str]:
    """Every path of the working tree that some stage copies."""
    lines = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [path for line in lines if not line[0].startswith("--from") for path in line]


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    """.dockerignore lets in exactly what the Dockerfile names; all of it exists."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    assert let_in == set(copied_from_context())
    assert all((ROOT / path).exists() for path in let_in)


def test_every_package_is_copied() -> None:
    """What the wheel is to hold reaches the stage that builds it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        targets = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]
    for package in targets["wheel"]["packages"]:
        assert package.split("/")[0] in copied_from_context()


@pytest.mark.parametrize("target", [*SERVICE_OF, "models"])
def test_final_stages_have_no_user_rights_and_no_builder(target: str) -> None:
    """Each stands on the same unprivileged stage and adds finished packages only."""
    parent, text = stages()[target]
    assert parent == "service"
    assert "USER" not in text and "RUN" not in text
    base, common = stages()["service"]
    assert base == "${BASE_IMAGE}"
    assert re.search(r"^USER 10001:10001$", common, flags=re.M)
    assert "apt-get" not in DOCKERFILE


def test_operations_are_compiled_apart_from_what_is_shipped() -> None:
    """One stage has a compiler; target and draft take the library alone, where it is looked for."""
    parents = [parent for parent, _ in stages().values()]
    assert stages()["kernels"][0] == "${COMPILER_IMAGE}" and parents.count("${COMPILER_IMAGE}") == 1
    assert "kernels" not in parents
    place = f"/opt/outrider/outrider_kernels/{BEFOREHAND.name}"
    for name, (_, text) in stages().items():
        taken = [line for line in text.splitlines() if "--from=kernels" in line]
        expected = [f"COPY --from=kernels /opt/lib {place}"] if name in ("target", "draft") else []
        assert taken == expected


@pytest.mark.parametrize(("target", "service"), SERVICE_OF.items())
def test_each_service_listens_and_is_probed_on_its_own_ports(target: str, service: str) -> None:
    """Ports are the settings' defaults; a container listens on all of its addresses."""
    text = stages()[target][1]
    settings = SERVICES[service]()
    ports = [settings.port, getattr(settings, "http_port", None), settings.metrics_port]
    assert f"EXPOSE {' '.join(str(port) for port in ports if port)}\n" in text
    assert f'ready.py", "{settings.metrics_port}"]' in text
    name = service.upper()
    assert f"OUTRIDER_{name}_HOST=0.0.0.0" in text
    assert f"OUTRIDER_{name}_METRICS_HOST=0.0.0.0" in text
    assert ("OUTRIDER_GATEWAY_HTTP_HOST=0.0.0.0" in text) is (service == "gateway")
    assert f'ENTRYPOINT ["outrider", "{service}"]' in text


@contextmanager
def admin_that_says(status: int) -> Iterator[int]:
    """The port of a server that answers /readyz so, and everything else with 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def probe(port: int) -> subprocess.CompletedProcess[str]:
    """The health check as a container runs it."""
    return subprocess.run(
        [sys.executable, "-IS", str(READY), str(port)], capture_output=True, text=True, timeout=10
    )


@pytest.mark.parametrize(("answer", "status"), [(200, 0), (503, 1), (404, 1)])
def test_the_probe_says_what_the_service_says(answer: int, status: int) -> None:
    """Ready with 200 and nothing else."""
    with admin_that_says(answer) as port:
        assert probe(port).returncode == status


def test_the_probe_fails_in_one_line_where_nobody_listens() -> None:
    """While a service is starting there is no traceback in the health log."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = probe(port)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("no answer")
