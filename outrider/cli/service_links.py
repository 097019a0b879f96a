"""Variables that Kubernetes sets in every pod for each Service: with ours they share a beginning.

For a Service called `outrider-target` there are OUTRIDER_TARGET_SERVICE_HOST and several more, one
of them with the name of a setting: OUTRIDER_TARGET_PORT, which then is a URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(
    r"(OUTRIDER(?:_\w+?)?)_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
_URL_NAME = re.compile(r"(OUTRIDER(?:_\w+)?)_PORT")
_URL = re.compile(r"(?:tcp|udp|sctp)://")
ADVICE = "set enableServiceLinks: false in the spec of the pod, or call the Service something else"


def is_service_link(name: str, value: str) -> bool:
    """Nobody has set the variable on purpose."""
    return bool(_match(name, value))


def _match(name: str, value: str) -> re.Match[str] | None:
    return _NAME.fullmatch(name) or (_URL_NAME.fullmatch(name) if _URL.match(value) else None)


def links_told(environment: Mapping[str, str]) -> str:
    """What is there and where it is from, in words; empty if there is nothing."""
    found = {name: _match(name, value) for name, value in sorted(environment.items())}
    services = {name: match[1] for name, match in found.items() if match}
    if not services:
        return ""
    first, service = next(iter(services.items()))
    more = f" and {len(services) - 1} more" if len(services) > 1 else ""
    called = service.lower().replace("_", "-")
    return f"{first}{more}: Kubernetes sets these for a Service called {called}"
