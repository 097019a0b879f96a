"""--tls-ca, --tls-cert and --tls-key: how the commands that ask a gateway reach it through TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from outrider.serving.settings import SettingsError
from outrider.serving.tls import ClientTls
from outrider.serving.tls_settings import client_tls

_PATH = click.Path(dir_okay=False)


@dataclass(frozen=True, slots=True)
class _Given:
    """The options' values; empty for what was not given."""

    tls_ca: str
    tls_cert: str
    tls_key: str


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command the three options, and its function an argument `tls`."""

    @functools.wraps(command)
    def with_tls(*args: Any, tls_ca: str, tls_cert: str, tls_key: str, **values: Any) -> Any:
        return command(*args, tls=_read(_Given(tls_ca, tls_cert, tls_key)), **values)

    for name, about in (
        ("key", "PEM file of that certificate's key."),
        ("cert", "PEM file of a certificate, for a gateway that asks for one."),
        ("ca", "PEM file of who signs the gateway's certificate. Empty: no TLS."),
    ):
        option = click.option(
            f"--tls-{name}",
            type=_PATH,
            default="",
            metavar="FILE",
            envvar=f"OUTRIDER_TLS_{name.upper()}",
            help=about,
        )
        with_tls = option(with_tls)
    return with_tls


def _read(given: _Given) -> ClientTls | None:
    if (given.tls_cert or given.tls_key) and not given.tls_ca:
        raise click.UsageError("tls_cert and tls_key mean nothing without tls_ca")
    try:
        return client_tls(given)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
