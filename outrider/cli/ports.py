"""Whether a service could listen on a port of this machine. Knows nothing of who does."""

from __future__ import annotations

import socket


def why_not(host: str, port: int) -> OSError | None:
    """What the system says to somebody who wants to listen there; None where one could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as attempt:
            # As a server does: connections that have ended are in nobody's way.
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind((host.strip("[]"), port))
    except OSError as error:
        return error
    return None
