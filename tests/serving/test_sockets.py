"""Who only connects: what that may cost a service, and for how long."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc
import pytest

from outrider.serving.channel import server_options

SCRIPT = """
import resource
from outrider.serving.sockets import allow_many
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
allow_many()
raised = resource.getrlimit(resource.RLIMIT_NOFILE)
assert raised == (min(hard, 65_536), hard), raised
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
allow_many()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
"""


def test_as_many_descriptors_as_there_may_be() -> None:
    """The soft limit becomes the hard one, up to a size; where it is that already nothing fails."""
    subprocess.run([sys.executable, "-c", SCRIPT], timeout=15, check=True)


async def test_a_client_of_grpc_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its connection when the time of a handshake is over."""
    monkeypatch.setattr("outrider.serving.channel._HANDSHAKE_MS", 300)
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        while await reader.read(1024):
            pass  # the server's own settings
    writer.close()
    await server.stop(0)
