"""What a service's settings say of TLS: who it is to its callers, and how it calls others."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Protocol

from outrider.serving.settings import SettingsError
from outrider.serving.tls import ClientTls, ServerTls, pair_of


class ServerTlsSettings(Protocol):
    """Paths of a service's settings, each empty for none."""

    @property
    def tls_cert(self) -> str:
        """Its certificate, the chain behind it."""

    @property
    def tls_key(self) -> str:
        """Its key."""

    @property
    def tls_client_ca(self) -> str:
        """Who signs its clients."""


class ClientTlsSettings(Protocol):
    """Paths of a service that calls others, each empty for none."""

    @property
    def tls_ca(self) -> str:
        """Who signs those that it calls."""

    @property
    def tls_cert(self) -> str:
        """Shown to servers that ask."""

    @property
    def tls_key(self) -> str:
        """Its key."""


def server_tls(settings: ServerTlsSettings) -> ServerTls | None:
    """What the settings say; None: no TLS. Raises SettingsError."""
    pair = pair_of(_path(settings.tls_cert), _path(settings.tls_key))
    client_ca = _path(settings.tls_client_ca)
    if pair is None:
        if client_ca is not None:
            raise SettingsError("tls_client_ca is set without tls_cert and tls_key")
        return None
    return ServerTls(*pair, client_ca)


def client_tls(settings: ClientTlsSettings) -> ClientTls | None:
    """What the settings say of calls to others; None: no TLS. Raises SettingsError."""
    ca = _path(settings.tls_ca)
    if ca is None:
        return None
    return ClientTls(ca, _path(settings.tls_cert), _path(settings.tls_key))


def is_loopback(host: str) -> bool:
    """Only this machine's own programs reach what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _path(setting: str) -> Path | None:
    return Path(setting) if setting else None
