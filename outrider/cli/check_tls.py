"""What `outrider doctor` says of the TLS files that the services are told to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.cli.finding import Finding, ok, problem, warning
from outrider.serving.settings import SettingsError
from outrider.serving.tls_settings import client_tls, is_loopback, server_tls


def check_tls(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding for each service that has such files, and for each port that should have some.

    settings: by service.
    """
    for service, its in settings.items():
        topic = f"{service} TLS"
        try:
            server = server_tls(its)
            client = client_tls(its) if hasattr(its, "tls_ca") else None
        except SettingsError as error:
            yield problem(topic, str(error), f"correct the [{service}] settings or the files")
            continue
        reached = [] if server else [port for port in _ports(its) if not is_loopback(port[0])]
        for host, port in reached:
            text = f"other machines can reach {host}:{port}, and it has no TLS"
            yield warning(topic, text, f"set [{service}] tls_cert and tls_key")
        if reached:
            continue
        if server is not None or client is not None:
            yield ok(
                topic, f"its files can be used: {_what(server is not None, client is not None)}"
            )


def _ports(settings: Any) -> list[tuple[str, int]]:
    """Host and port of all that a service's certificate is for."""
    ports = [(settings.host, settings.port)]
    if getattr(settings, "http_port", -1) >= 0:
        ports.append((settings.http_host, settings.http_port))
    return ports


def _what(server: bool, client: bool) -> str:
    uses = ["on its port"] if server else []
    return " and ".join([*uses, *(["to those that it calls"] if client else [])])
