"""The draft service as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc

from tests.support.draft_stream import Follower, make_open, open_stream

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from draft_service.service import run
from outrider.serving.settings import DraftSettings
run(DraftSettings(port={port}, metrics_port=0))
"""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_sigterm_ends_open_streams_and_the_process() -> None:
    """A target sees UNAVAILABLE at once, and the process exits with 0 within its grace."""
    port = free_port()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT.format(port=port),
        env=os.environ | {"PYTHONPATH": path}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with open_stream(f"127.0.0.1:{port}", wait_for_ready=True) as stream:
            follower = Follower(stream, 1, make_open(prompt_len=5))
            await follower.open([1, 2, 3, 1, 2], window=2)
            assert await follower.collect(2) == [3, 1]
            process.send_signal(signal.SIGTERM)
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


BROKEN = """
from draft_service.proposers.ngram import NgramProposer
from draft_service.service import run
from outrider.serving.settings import DraftSettings
class Broken(NgramProposer):
    async def propose(self, sessions):
        raise RuntimeError("no luck")
async def make(settings):
    return Broken(1, 4)
run(DraftSettings(port={port}, metrics_port=0), make)
"""


async def test_a_drafter_whose_loop_dies_ends_its_process() -> None:
    """A supervisor sees a status that is not 0; the open stream hears why before."""
    port = free_port()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BROKEN.format(port=port),
        env=os.environ | {"PYTHONPATH": path}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with open_stream(f"127.0.0.1:{port}", wait_for_ready=True) as stream:
            for number in range(1, 4):
                await Follower(stream, number, make_open(prompt_len=3)).open([1, 2, 3], window=2)
                if number < 3:
                    await stream.receive()
            code, message = await stream.status()
            assert code is grpc.StatusCode.INTERNAL and "no luck" in message
        _, said = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 1
        assert b"EngineFailed: the draft loop failed" in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_lookup_needs_no_torch() -> None:
    """The n-gram drafter runs where torch is not installed."""
    code = "import sys, draft_service.service; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True, timeout=15
    )
