"""Sockets that a service listens on itself, where gRPC does not do it."""

from __future__ import annotations

import socket


def bind(host: str, port: int, purpose: str, setting: str) -> socket.socket:
    """A TCP socket, bound. Raises OSError, saying what the port is for and which setting it has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"cannot listen on {host}:{port} for {purpose}: {error.strerror or error}; set "
            f"{setting} to another one, or to -1 for none"
        ) from error
    return bound
