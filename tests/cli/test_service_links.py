"""What Kubernetes sets for a Service with a name like ours is named as such, by every command."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from outrider.cli.main import main
from outrider.cli.options import SERVICES, variable
from outrider.cli.service_links import is_service_link

LINKS = {
    "OUTRIDER_TARGET_SERVICE_HOST": "10.0.0.7",
    "OUTRIDER_TARGET_SERVICE_PORT": "50052",
    "OUTRIDER_TARGET_SERVICE_PORT_GRPC": "50052",
    "OUTRIDER_TARGET_PORT": "tcp://10.0.0.7:50052",
    "OUTRIDER_TARGET_PORT_50052_TCP": "tcp://10.0.0.7:50052",
    "OUTRIDER_TARGET_PORT_50052_TCP_PROTO": "tcp",
    "OUTRIDER_TARGET_PORT_50052_TCP_PORT": "50052",
    "OUTRIDER_TARGET_PORT_50052_TCP_ADDR": "10.0.0.7",
}


@pytest.mark.parametrize("name", sorted(LINKS))
def test_each_of_them_is_refused_in_words(name: str) -> None:
    """Who sets it, for what, and what ends it."""
    result = CliRunner().invoke(main, ["models", "list"], env={name: LINKS[name]})
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"{name}: Kubernetes sets these for a Service called outrider-target;" in said
    assert "enableServiceLinks: false" in said


def test_doctor_starts_and_says_it() -> None:
    """As a problem; the port is looked for where it is without them."""
    arguments = ["doctor", "--json", "--model=/nothing/here", "--gateway-metrics-port=-1"]
    result = CliRunner().invoke(main, arguments, env=LINKS)
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    (told,) = [each for each in findings if "Kubernetes" in each["text"]]
    assert (told["topic"], told["level"]) == ("environment", "problem")
    assert told["text"].startswith("OUTRIDER_TARGET_PORT and 7 more: ")
    assert "enableServiceLinks: false" in told["advice"]
    (addresses,) = [each for each in findings if each["topic"] == "addresses"]
    assert "target 127.0.0.1:50052 (default)" in addresses["text"]


def test_a_service_called_outrider() -> None:
    """The shortest name that meets ours."""
    result = CliRunner().invoke(main, ["config"], env={"OUTRIDER_PORT": "tcp://10.0.0.7:1"})
    assert result.exit_code == 2
    assert "for a Service called outrider;" in " ".join(result.stderr.split())


def test_no_setting_of_ours_looks_like_one() -> None:
    """With a value that somebody may mean."""
    assert not is_service_link("OUTRIDER_TARGET_PORT", "50052")
    for service, settings_class in SERVICES.items():
        for field in settings_class.__dataclass_fields__:
            assert not is_service_link(variable(service, field), "1")
