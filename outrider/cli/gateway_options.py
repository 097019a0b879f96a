"""Options of the commands that ask a gateway: where it is, and what to show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from outrider.cli.tls_options import tls_options
from outrider.cli.values import ADDRESS, API_KEY


def gateway_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the command's function gets `address`, `api_key` and `tls`."""
    return address_option(credential_options(command))


def credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the command's function gets `api_key` and `tls`."""
    api_key = click.option(
        "--api-key",
        type=API_KEY,
        default=None,
        envvar="OUTRIDER_API_KEY",
        help="Key for a gateway that asks for one; other users of this machine may see it, but not "
        "the variable.",
    )
    return api_key(tls_options(command))


def address_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the command's function gets `address`."""
    address = click.option(
        "--address",
        type=ADDRESS,
        default="127.0.0.1:50051",
        show_default=True,
        envvar="OUTRIDER_ADDRESS",
        help="The gateway.",
    )
    return address(command)
