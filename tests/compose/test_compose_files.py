"""The compose files as compose itself reads them: every combination is valid and locked down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.options import SERVICES, check_environment
from outrider.cli.stack import STOP_MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
COMBINATIONS = [
    "",
    "apps",
    "ui",
    "apps ui",
    "tls",
    "apps tls",
    "draft-model",
    "gpu",
    "gpu draft-model",
    "gpu draft-model two-gpus",
]
OWN = ("models", "gateway", "target", "draft")
LONG_LIVED = ("gateway", "target", "draft")
OTHERS = ("collector", "jaeger", "prometheus", "grafana")


def config(combination: str = "", **variables: str) -> dict[str, Any]:
    """What compose makes of the files, every profile included."""
    names = ["compose.yaml", *(f"compose.{each}.yaml" for each in combination.split())]
    files = [word for name in names for word in ("-f", str(ROOT / "compose" / name))]
    done = subprocess.run(
        [COMPOSE, *files, "--profile", "*", "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=20,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def services(combination: str = "", **variables: str) -> Mapping[str, dict[str, Any]]:
    """The services of a combination, by name."""
    return config(combination, **variables)["services"]


def seconds(duration: str) -> float:
    """Compose's "1m5s" as a number."""
    minutes, _, rest = duration.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s") or 0)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_service_is_locked_down(combination: str) -> None:
    """No capabilities, no way to more rights, a read-only root, limits, and no fixed name, which
    would forbid a second one."""
    for name, each in services(combination).items():
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert each["read_only"] is True, name
        limits = each["deploy"]["resources"]["limits"]
        assert int(limits["memory"]) > 0 and limits["pids"] > 0, name
        assert limits.get("cpus", 0) > 0 or name == "target"
        assert each["restart"] == ("no" if name == "models" else "unless-stopped"), name
        assert each["logging"]["options"]["max-file"] == "3", name
        assert {"privileged", "container_name", "network_mode", "pid", "devices"} & set(
            each
        ) == set()
        for volume in each.get("volumes", []):
            assert "docker.sock" not in volume.get("source", "")


@pytest.mark.parametrize("combination", [each for each in COMBINATIONS if "ui" not in each])
def test_only_the_gateway_is_published_and_on_loopback(combination: str) -> None:
    """From outside only its two doors can be reached; the inside network leads nowhere."""
    read = config(combination)
    published = {name: each["ports"] for name, each in read["services"].items() if "ports" in each}
    assert list(published) == ["gateway"]
    ports = [(port["host_ip"], port["published"], port["target"]) for port in published["gateway"]]
    assert ports == [("127.0.0.1", "50051", 50051), ("127.0.0.1", "8080", 8080)]
    assert read["networks"]["inside"]["internal"] is True
    for name in ("target", "draft", *OTHERS):
        assert list(read["services"][name]["networks"]) == ["inside"], name


def test_pages_are_published_on_loopback_only_when_asked_for() -> None:
    """The override publishes three pages and nothing else, to this machine alone."""
    for name, each in services("ui").items():
        for port in each.get("ports", []):
            assert port["host_ip"] == "127.0.0.1"
            assert name in ("gateway", "grafana", "prometheus", "jaeger")
        assert ("ports" in each) == ("outside" in each["networks"] and name != "models"), name


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_what_the_services_are_told_is_known_to_them(combination: str) -> None:
    """No OUTRIDER_ variable of any service is a typing error, and traces go to the collector, or
    nowhere without one."""
    read = services(combination)
    for name in OWN:
        check_environment({k: v or "" for k, v in read[name]["environment"].items()})
    for name in LONG_LIVED:
        endpoint = read[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == ("" if "apps" in combination else "http://collector:4317")


def test_services_get_longer_to_stop_than_they_give_their_streams() -> None:
    """The engine kills only what has not ended within its own grace time and a drain's margin."""
    for name, each in services().items():
        if name in LONG_LIVED:
            assert seconds(each["stop_grace_period"]) >= SERVICES[name]().grace_s + STOP_MARGIN_S


def test_the_order_of_starting() -> None:
    """The model first, then the target, then the gateway; the target waits for no drafter."""
    read = services()
    conditions = {
        name: {k: v["condition"] for k, v in read[name].get("depends_on", {}).items()}
        for name in LONG_LIVED
    }
    assert conditions == {
        "gateway": {"target": "service_healthy"},
        "target": {"models": "service_completed_successfully"},
        "draft": {},
    }
    assert "profiles" not in read["models"]


def test_without_the_other_images_only_the_services_start() -> None:
    """The override puts all of them behind a profile, and nothing else."""
    behind = {name for name, each in services("apps").items() if each.get("profiles")}
    assert behind == set(OTHERS)
    assert all("profiles" not in each for each in services().values())


def test_images_of_others_are_pinned() -> None:
    """A version each: never `latest`, never nothing."""
    for name in OTHERS:
        tag = services()[name]["image"].rpartition(":")[2]
        assert any(char.isdigit() for char in tag) and "." in tag, name


def test_what_is_mounted_exists() -> None:
    """A missing file would be mounted as an empty folder."""
    for name, each in services().items():
        for volume in each.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']}"


def test_gpus_go_to_whom_they_are_meant_for() -> None:
    """A GPU build and a device for the target, or one for each of two; drafters else have none."""

    def devices(service: Mapping[str, Any]) -> list[str]:
        reserved = service["deploy"]["resources"].get("reservations", {}).get("devices", [])
        return [number for each in reserved for number in each["device_ids"]]

    for combination, target, draft in [
        ("draft-model", [], []),
        ("gpu draft-model", ["0"], []),
        ("gpu draft-model two-gpus", ["0"], ["1"]),
    ]:
        read = services(combination)
        assert (devices(read["target"]), devices(read["draft"])) == (target, draft)
        for name, has in (("target", target), ("draft", draft)):
            assert (read[name]["build"]["args"]["TORCH_INDEX"] == "") == bool(has)
            assert read[name]["image"].endswith("-cuda") == bool(has)
            device = read[name]["environment"].get(f"OUTRIDER_{name}_DEVICE".upper(), "cpu")
            assert device == ("cuda:0" if has else "cpu")


def test_tls_is_on_every_hop() -> None:
    """Each service finds its own files and nobody else's, in a folder that must be there; inside,
    both sides show a certificate."""
    read = services("tls", TLS="/srv/certificates")
    for name in LONG_LIVED:
        (mounted,) = [each for each in read[name]["volumes"] if each["target"] == "/run/tls"]
        assert (mounted["source"], mounted["read_only"]) == (f"/srv/certificates/{name}", True)
        assert mounted["bind"] == {"create_host_path": False}
    told = {
        name: {
            key.removeprefix(f"OUTRIDER_{name}_".upper()): value
            for key, value in read[name]["environment"].items()
            if "_TLS_" in key
        }
        for name in LONG_LIVED
    }
    own = {"TLS_CERT": "/run/tls/cert.pem", "TLS_KEY": "/run/tls/key.pem"}
    ca = "/run/tls/ca.pem"
    assert told == {
        "gateway": own | {"TLS_CA": ca},
        "target": own | {"TLS_CA": ca, "TLS_CLIENT_CA": ca},
        "draft": own | {"TLS_CLIENT_CA": ca},
    }


def test_variables_choose_mirrors_model_and_scale() -> None:
    """What a user sets in the shell or in `.env` arrives where it is meant."""
    read = services(
        BASE_IMAGE="mirror.example/python:3.11-slim-bookworm",
        PIP_INDEX_URL="https://mirror.example/simple",
        COMPILER_IMAGE="mirror.example/python:3.11-bookworm",
        TORCH_INDEX="",
        MODEL="some-model",
        PUBLISH="127.0.0.1:6000",
        PUBLISH_HTTP="127.0.0.1:6080",
        DRAFTS="3",
        TARGET_CPUS="2.5",
    )
    for name in OWN:
        arguments = read[name]["build"]["args"]
        assert arguments["BASE_IMAGE"] == "mirror.example/python:3.11-slim-bookworm"
        assert arguments["PIP_INDEX_URL"] == "https://mirror.example/simple"
    assert read["target"]["build"]["args"]["TORCH_INDEX"] == ""
    compiler = read["target"]["build"]["args"]["COMPILER_IMAGE"]
    assert compiler == "mirror.example/python:3.11-bookworm"
    assert read["models"]["command"] == ["fetch", "some-model"]
    assert read["target"]["environment"]["OUTRIDER_TARGET_MODEL"] == "some-model"
    assert read["gateway"]["environment"]["OUTRIDER_GATEWAY_MODEL"] == "some-model"
    assert [port["published"] for port in read["gateway"]["ports"]] == ["6000", "6080"]
    assert read["draft"]["deploy"]["replicas"] == 3
    assert read["target"]["deploy"]["resources"]["limits"]["cpus"] == 2.5
