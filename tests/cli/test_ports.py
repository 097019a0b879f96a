"""Whether one could listen on a port."""

from __future__ import annotations

import errno
import socket

from outrider.cli.ports import why_not


def test_a_taken_port_and_a_free_one() -> None:
    """A listener is in the way until it has gone."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        error = why_not("127.0.0.1", port)
        assert error is not None and error.errno == errno.EADDRINUSE
    assert why_not("127.0.0.1", port) is None


def test_an_address_of_another_machine() -> None:
    """The system's own words."""
    error = why_not("192.0.2.1", 50051)
    assert error is not None and error.errno == errno.EADDRNOTAVAIL
