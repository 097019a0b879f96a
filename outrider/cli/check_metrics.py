"""What `outrider doctor` says of the ports for metrics: free, ours, or somebody else's.

Needs nothing that a service needs: a machine that only asks others has no metrics library.
"""

from __future__ import annotations

import http.client
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.cli.finding import Finding, ok, problem
from outrider.cli.ports import why_not

TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Straight there: no proxy knows this machine's ports."""


def check_metrics(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding a service that has such a port; `settings` are by service."""
    for service, its in settings.items():
        if its.metrics_port > 0:  # 0: any free one, -1: none
            yield _look(service, its.metrics_host, its.metrics_port)


def _look(service: str, host: str, port: int) -> Finding:
    topic = f"{service} metrics {host}:{port}"
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError:
        return _nobody(service, topic, host, port)
    page = _read(f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics")
    build = next((line for line in page.splitlines() if line.startswith("outrider_build_info")), "")
    if f'service="{service}"' in build:
        return ok(topic, "answers")
    who = "another service of ours" if build else "something else"
    return problem(topic, f"{who} listens there", _advice(service))


def _nobody(service: str, topic: str, host: str, port: int) -> Finding:
    error = why_not(host, port)
    if error is not None:
        return problem(topic, f"nobody listens, and one cannot: {error.strerror}", _advice(service))
    return ok(topic, "nobody listens; the port is free")


def _advice(service: str) -> str:
    return f"give the {service} another port with --{service}-metrics-port; -1 is none"


def _read(url: str) -> str:
    """The page, or nothing."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as answer:
            page: bytes = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):  # what is there may speak no HTTP
        return ""
    return page.decode(errors="replace")
