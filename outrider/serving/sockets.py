"""Sockets that a service listens on itself, where gRPC does not do it; how many there may be."""

from __future__ import annotations

import contextlib
import resource
import socket

_MOST_DESCRIPTORS = 65_536


def allow_many() -> None:
    """Raise this process's limit of file descriptors as far as it may itself.

    It is 1024 on many machines for the sake of old programs, and gRPC takes any number of
    connections: clients that do nothing but connect would use up what files, probes and the other
    ports need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems have limits beside the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
