"""What `outrider doctor` says of the ports for HTTP: free, ours, or somebody else's.

Needs nothing that a service needs: a machine that only asks others has no metrics library.
"""

from __future__ import annotations

import http.client
import socket
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.cli.finding import Finding, ok, problem
from outrider.cli.ports import why_not

TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Straight there: no proxy knows this machine's ports."""


def check_http(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for each port that there is to be; `settings` are by service."""
    for service, its in settings.items():
        if its.metrics_port > 0:  # 0: any free one, -1: none
            flag = f"--{service}-metrics-port"
            place = _Place(f"{service} metrics", its.metrics_host, its.metrics_port, flag)
            yield _look(place, partial(_is_service, service=service))
        if getattr(its, "http_port", 0) > 0:
            place = _Place("gateway HTTP", its.http_host, its.http_port, "--gateway-http-port")
            yield _look(place, None if its.tls_cert else _is_door)


@dataclass(frozen=True, slots=True)
class _Place:
    what: str
    host: str
    port: int
    flag: str
    """Gives it another port."""

    @property
    def topic(self) -> str:
        return f"{self.what} {self.host}:{self.port}"

    @property
    def advice(self) -> str:
        service = self.what.split()[0]
        return f"give the {service} another port with {self.flag}; -1 is none"

    def read(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return _read(f"http://{host}:{self.port}{path}")


_Who = Callable[[_Place], str]
"""Who listens there; empty for whom we expect."""


def _look(place: _Place, who: _Who | None) -> Finding:
    """who: None where only TLS could tell."""
    try:
        socket.create_connection((place.host, place.port), timeout=TIMEOUT_S).close()
    except OSError:
        return _nobody(place)
    if who is None:
        return ok(place.topic, "something listens; who, only TLS could tell")
    stranger = who(place)
    if stranger:
        return problem(place.topic, f"{stranger} listens there", place.advice)
    return ok(place.topic, "answers")


def _nobody(place: _Place) -> Finding:
    error = why_not(place.host, place.port)
    if error is not None:
        text = f"nobody listens, and one cannot: {error.strerror}"
        return problem(place.topic, text, place.advice)
    return ok(place.topic, "nobody listens; the port is free")


def _is_service(place: _Place, service: str) -> str:
    page = place.read("/metrics").splitlines()
    build = next((line for line in page if line.startswith("outrider_build_info")), "")
    if f'service="{service}"' in build:
        return ""
    return "another service of ours" if build else "something else"


def _is_door(place: _Place) -> str:
    return "" if '"title":"Outrider"' in place.read("/openapi.json") else "something else"


def _read(url: str) -> str:
    """The page, or nothing."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as answer:
            page: bytes = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):  # what is there may speak no HTTP
        return ""
    return page.decode(errors="replace")
