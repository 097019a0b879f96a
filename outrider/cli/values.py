"""Types of options that click has none for: what cannot be meant is wrong usage, at once."""

from __future__ import annotations

import math
from typing import Any

import click

from outrider.client.wire import key_metadata
from outrider.serving.settings import AddressError, check_address
from outrider.text import is_text

_LONGEST_S = 1e9


class _Text(click.ParamType[str]):
    """What a message can carry."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse bytes that are no UTF-8."""
        if not is_text(value):
            self.fail("must be text in UTF-8", param, ctx)
        return str(value)


class _Address(click.ParamType[str]):
    """Where a service listens."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what gRPC would make something else of."""
        try:
            check_address(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class _ApiKey(click.ParamType[str]):
    """What a header can carry."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what no gateway can have given, without repeating it."""
        try:
            key_metadata(value)
        except ValueError:
            self.fail("must be printable ASCII, and not empty", param, ctx)
        return str(value)


class _Seconds(click.FloatRange):
    """A time that somebody can wait for."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Refuse what is no number, which is in every range."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("must be a number", param, ctx)
        return seconds


TEXT = _Text()
ADDRESS = _Address()
API_KEY = _ApiKey()
SECONDS = _Seconds(0, _LONGEST_S, min_open=True)
