"""Flags and variables of a service, made from its settings class.

A field `max_waiting` of TargetSettings is the flag `--max-waiting` of `outrider target`, the flag
`--target-max-waiting` of `outrider up` and the variable OUTRIDER_TARGET_MAX_WAITING everywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from outrider.serving.settings import (
    DraftSettings,
    GatewaySettings,
    SettingsError,
    TargetSettings,
)

S = TypeVar("S")

SERVICES: dict[str, type[Any]] = {
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
# Variables that are no field of a service.
OTHER_VARIABLES = {"OUTRIDER_CACHE", "OUTRIDER_ADDRESS"}


def variable(service: str, field_name: str) -> str:
    """The environment variable of one setting."""
    return f"OUTRIDER_{service}_{field_name}".upper()


def service_options(service: str, prefix: str = "") -> Callable[[Any], Any]:
    """A decorator that gives a command every setting of `service` as an option."""

    def decorate(command: Any) -> Any:
        # The first decorator applied is the last option shown, hence the reversed order.
        for field in reversed(dataclasses.fields(SERVICES[service])):
            option = click.option(
                f"--{prefix}{field.name}".replace("_", "-"),
                type=type(field.default),
                default=field.default,
                show_default=True,
                envvar=variable(service, field.name),
                help=field.metadata["help"],
            )
            command = option(command)
        return command

    return decorate


def build(settings_class: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """The settings object from a command's values, checked."""
    names = [field.name for field in dataclasses.fields(settings_class)]  # type: ignore[arg-type]
    try:
        return settings_class(**{name: values[f"{prefix}{name}"] for name in names})
    except SettingsError as error:
        raise click.UsageError(f"{prefix.replace('_', '-')}{error}") from error


def to_flags(settings: Any) -> list[str]:
    """The command line that gives a service exactly these settings."""
    return [
        f"--{field.name.replace('_', '-')}={getattr(settings, field.name)}"
        for field in dataclasses.fields(settings)
    ]


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse OUTRIDER_ variables that nothing reads: most are a typing error."""
    known = OTHER_VARIABLES | {
        variable(service, field.name)
        for service, settings_class in SERVICES.items()
        for field in dataclasses.fields(settings_class)
    }
    for name in sorted(environment):
        if name.startswith("OUTRIDER_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"nothing reads the variable {name}{hint}")
