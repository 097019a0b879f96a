"""`outrider config`: every setting of every service, and where each value is from."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from outrider.cli.config_file import toml_value
from outrider.cli.options import PREFIXES, SERVICES, build, origin, stack_options
from outrider.text import one_line


@click.command()
@click.option("--toml", "as_toml", is_flag=True, help="As a file that --config takes.")
@stack_options
@click.pass_context
def config(context: click.Context, /, as_toml: bool, **values: Any) -> None:
    """Show all settings and where each is from.

    A flag wins over a variable, a variable over the file, the file over the default.
    """
    for service, settings_class in SERVICES.items():
        settings = build(settings_class, values, PREFIXES[service])
        click.echo(f"[{service}]")
        for field in dataclasses.fields(settings_class):
            value = toml_value(getattr(settings, field.name))
            where = one_line(origin(context, service, field.name))
            if as_toml:
                click.echo(f"# {field.metadata['help']} ({where})\n{field.name} = {value}")
            else:
                click.echo(f"  {field.name:<18} {value:<30} {where}")
        click.echo()
