"""Flags and variables of a service, made from its settings class.

A field `max_waiting` of TargetSettings is the flag `--max-waiting` of `outrider target`, the flag
`--target-max-waiting` of `outrider up`, the variable OUTRIDER_TARGET_MAX_WAITING everywhere, and
`max_waiting` in the table [target] of a settings file. Flags win over variables, variables over the
file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from outrider.cli.config_file import ConfigFileError, load
from outrider.cli.service_links import ADVICE, is_service_link, links_told
from outrider.serving.settings import (
    OTHER_VARIABLES,
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
# How the settings of each service are called where one command takes those of all.
PREFIXES = {service: f"{service}_" for service in SERVICES}
CONFIG_VARIABLE = "OUTRIDER_CONFIG"
_CONFIG_PATH = "outrider.config"  # in the context's meta


def variable(service: str, field_name: str) -> str:
    """The environment variable of one setting."""
    return f"OUTRIDER_{service}_{field_name}".upper()


class SettingOption(click.Option):
    """An option that takes what somebody has set, not what Kubernetes has."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The variable's value, or None."""
        value = super().resolve_envvar_value(ctx)
        if value is not None and is_service_link(str(self.envvar), value):
            return None
        return value


def service_options(service: str, prefix: str = "") -> Callable[[Any], Any]:
    """A decorator that gives a command every setting of `service` as an option."""

    def decorate(command: Any) -> Any:
        # The first decorator applied is the last option shown, hence the reversed order.
        for field in reversed(dataclasses.fields(SERVICES[service])):
            option = click.option(
                f"--{prefix}{field.name}".replace("_", "-"),
                cls=SettingOption,
                type=type(field.default),
                default=field.default,
                show_default=True,
                envvar=variable(service, field.name),
                show_envvar=True,
                help=field.metadata["help"],
            )
            command = option(command)
        return command

    return decorate


def stack_options(command: Any) -> Any:
    """A decorator that gives a command the settings of all services, and `--config`."""
    for service in reversed(SERVICES):
        command = service_options(service, PREFIXES[service])(command)
    return config_option(PREFIXES)(command)


def config_option(prefixes: Mapping[str, str]) -> Callable[[Any], Any]:
    """A decorator that gives a command `--config`, for these services' options.

    The file's values become the defaults of the options, which click looks at last.
    """

    def read(context: click.Context, _: click.Parameter, given: Path | None) -> None:
        path = given or context.find_root().params.get("config") or _path_by_variable()
        if path is None:
            return
        try:
            tables = load(path, SERVICES)
        except ConfigFileError as error:
            raise click.UsageError(str(error)) from error
        context.meta[_CONFIG_PATH] = path
        context.default_map = {
            f"{prefix}{name}": value
            for service, prefix in prefixes.items()
            for name, value in tables.get(service, {}).items()
        }

    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,  # before the options whose defaults it gives
        expose_value=False,
        callback=read,
        help=f"A TOML file with tables {', '.join(f'[{s}]' for s in SERVICES)}. "
        f"Also the variable {CONFIG_VARIABLE}.",
    )


def _path_by_variable() -> Path | None:
    given = os.environ.get(CONFIG_VARIABLE)
    return Path(given) if given else None


def origin(context: click.Context, service: str, field_name: str) -> str:
    """Where a command with `stack_options` has a setting from, in words."""
    name = f"{PREFIXES[service]}{field_name}"
    source = context.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return f"flag --{name.replace('_', '-')}"
    if source is ParameterSource.ENVIRONMENT:
        return f"variable {variable(service, field_name)}"
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {context.meta[_CONFIG_PATH]}"
    return "default"


def is_given(context: click.Context, name: str) -> bool:
    """Somebody has chosen the option's value: by a flag, a variable, or a file that says something
    else than the default, as `outrider config --toml` writes the defaults too."""
    source = context.get_parameter_source(name)
    if source is ParameterSource.DEFAULT_MAP:
        default = next(each.default for each in context.command.params if each.name == name)
        return bool(context.params[name] != default)
    return source is not ParameterSource.DEFAULT


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


def check_environment(
    environment: Mapping[str, str] = os.environ, *, links_allowed: bool = False
) -> None:
    """Refuse OUTRIDER_ variables that nothing reads: most are a typing error.

    links_allowed: what Kubernetes sets is somebody else's to tell.
    """
    links = links_told(environment)
    if links and not links_allowed:
        raise click.UsageError(f"{links}; {ADVICE}")
    known = set(OTHER_VARIABLES) | {
        variable(service, field.name)
        for service, settings_class in SERVICES.items()
        for field in dataclasses.fields(settings_class)
    }
    for name in sorted(environment):
        ours = name.startswith("OUTRIDER_") and not is_service_link(name, environment[name])
        if ours and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"nothing reads the variable {name}{hint}")
