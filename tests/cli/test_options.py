"""Flags and variables come from the settings classes alone, and unknown ones are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from outrider.cli import options, services
from outrider.cli.main import main
from outrider.cli.up import stack_settings, up
from outrider.serving.settings import TargetSettings


@click.command()
@options.service_options("target")
def show(**values: object) -> None:
    """Prints the settings that the command line and the environment give."""
    click.echo(repr(options.build(TargetSettings, values)))


def run(arguments: list[str], **environment: str) -> str:
    """Output of `show`."""
    result = CliRunner().invoke(show, arguments, env=environment)
    return result.output.strip()


def test_defaults_are_the_settings_own() -> None:
    """Without flags and variables the settings are their class's defaults."""
    assert run([]) == repr(TargetSettings())


def test_a_flag_wins_over_a_variable() -> None:
    """Each field can be set by variable and by flag; the flag wins."""
    by_variable = run([], OUTRIDER_TARGET_MAX_WAITING="7")
    assert by_variable == repr(TargetSettings(max_waiting=7))
    by_flag = run(["--max-waiting", "8"], OUTRIDER_TARGET_MAX_WAITING="7")
    assert by_flag == repr(TargetSettings(max_waiting=8))


def test_flags_give_the_same_settings_again() -> None:
    """`to_flags` and the parser are inverse, for values of every type."""
    settings = TargetSettings(host="::1", draft_wait_ms=0.5, drafters="", max_waiting=0)
    assert run(options.to_flags(settings)) == repr(settings)


@pytest.mark.parametrize("service", sorted(options.SERVICES))
def test_every_setting_is_documented_in_the_help(service: str) -> None:
    """`outrider <service> --help` names each field with its text."""
    output = CliRunner().invoke(getattr(services, service), ["--help"]).output
    words = re.sub(r"\s+", " ", output)
    for field in dataclasses.fields(options.SERVICES[service]):
        assert f"--{field.name.replace('_', '-')} " in words
        assert field.metadata["help"] in words
        assert options.variable(service, field.name) in words


def test_a_value_outside_its_limits_is_a_usage_error() -> None:
    """The message names the setting and the limit."""
    result = CliRunner().invoke(show, ["--port", "70000"])
    assert result.exit_code == 2
    assert "port must be at most 65535, got 70000" in result.output


def test_unknown_names_are_errors_that_name_the_nearest() -> None:
    """A mistyped variable or flag stops the command and is not ignored."""
    env = {"OUTRIDER_TARGET_MAXWAITING": "3"}
    result = CliRunner().invoke(main, ["models", "list"], env=env)
    assert result.exit_code == 2
    assert "did you mean OUTRIDER_TARGET_MAX_WAITING?" in result.output
    result = CliRunner().invoke(show, ["--max-waitin", "3"])
    assert result.exit_code == 2 and "--max-waiting" in result.output


def up_values(*arguments: str) -> dict[str, object]:
    """What click hands to `up`."""
    return dict(up.make_context("up", list(arguments)).params)


def test_up_tells_each_service_where_the_next_one_is() -> None:
    """Ports given to one service reach the ones that call it; one model name serves both."""
    values = up_values("--target-port=7001", "--draft-port=7002", "--model=some/folder")
    model, no_draft = values.pop("model"), values.pop("no_draft")
    settings = stack_settings(values, model, no_draft)
    assert settings["gateway"].targets == "127.0.0.1:7001"
    assert settings["target"].drafters == "127.0.0.1:7002"
    assert settings["gateway"].model == settings["target"].model == "some/folder"
    assert settings["draft"].model == ""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings with which `up` would start its services."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("outrider.cli.up._run", lambda stack, settings, _: told.append(settings))
    return told


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("no_draft", [False, True])
def test_up_honours_addresses_that_it_is_given(
    told: list[dict[str, Any]], by_variable: bool, no_draft: bool
) -> None:
    """What is named by flag or variable replaces the address that `up` would give."""
    addresses = {"target-drafters": "far:1,near:2", "gateway-targets": "other:3"}
    flags = [f"--{name}={value}" for name, value in addresses.items()]
    env = {f"OUTRIDER_{n.replace('-', '_').upper()}": value for n, value in addresses.items()}
    arguments = [*(["--no-draft"] if no_draft else []), *([] if by_variable else flags)]
    result = CliRunner().invoke(up, arguments, env=env if by_variable else {})
    assert result.exit_code == 0, result.output
    assert told[0]["target"].drafters == "far:1,near:2"
    assert told[0]["gateway"].targets == "other:3"


def test_up_honours_a_file_where_it_says_something(
    told: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An address in the file counts, a default that was written down does not."""
    path = tmp_path / "outrider.toml"
    path.write_text(
        '[gateway]\ntargets = "127.0.0.1:50052"\n[target]\nport = 7001\ndrafters = "far:1"\n'
    )
    result = CliRunner().invoke(up, ["--config", str(path)])
    assert result.exit_code == 0, result.output
    assert told[0]["gateway"].targets == "127.0.0.1:7001"
    assert told[0]["target"].drafters == "far:1"


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
def test_up_refuses_port_0(service: str) -> None:
    """Nobody could be told where such a service listens."""
    result = CliRunner().invoke(up, [f"--{service}-port=0"])
    assert result.exit_code == 2
    assert f"{service}-port must not be 0" in result.output


def test_up_without_a_drafter() -> None:
    """`--no-draft` runs two services, and the target looks for no drafter."""
    values = up_values("--no-draft")
    settings = stack_settings(values, values.pop("model"), values.pop("no_draft"))
    assert sorted(settings) == ["gateway", "target"]
    assert settings["target"].drafters == ""
