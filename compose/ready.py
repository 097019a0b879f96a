"""`ready.py PORT`: exit status 0 if the service in this container says that it is ready.

Every container runs this every few seconds, so it asks with a bare socket: importing an HTTP client
would double the CPU time that it takes.
"""

from __future__ import annotations

import socket
import sys

TIMEOUT_S = 3.0


def is_ready(port: int) -> bool:
    """Whether `GET /readyz` on the admin port is answered with 200."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        status_line = connection.makefile("rb").readline(100)
    return status_line.split()[1:2] == [b"200"]


if __name__ == "__main__":
    try:
        sys.exit(0 if is_ready(int(sys.argv[1])) else "not ready")
    except OSError as error:
        sys.exit(f"no answer: {error}")
