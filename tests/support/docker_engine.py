"""A Docker engine for tests: the one that answers here, else one of the test's own.

    with engine_for_tests() as engine:
        engine.docker("ps")
        engine.compose("-f", "compose.yaml", "up", "--detach")

An engine of the test's own has its folders, its socket and its process apart from any other, and is
gone afterwards, with the bridge and the packet filter rules that engines leave behind. It cannot
count on a registry, so it gets images to build from that are made here (see `base_image`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.base_image import BASE_IMAGE, COMPILER_IMAGE, make_images

START_S = 60.0
STOP_S = 90.0
_COMPOSE = Path(sys.executable).parent / "docker-compose"
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_EMPTY_TABLES = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}


class Engine:
    """One engine, and what compose files are told when they are used with it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def docker(self, *words: str, timeout_s: float = 120) -> str:
        """Standard output of `docker WORDS`. AssertionError with all that it says if it fails."""
        return self._run("docker", *words, timeout_s=timeout_s)

    def compose(self, *words: str, timeout_s: float = 300, **variables: str) -> str:
        """Standard output of `docker compose WORDS`."""
        return self._run(str(_COMPOSE), *words, timeout_s=timeout_s, **variables)

    def _run(self, *words: str, timeout_s: float, **variables: str) -> str:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=os.environ | self._variables | variables,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def why_no_engine() -> str:
    """What is missing here, in words; empty when `engine_for_tests` will find or make an engine."""
    if sys.platform != "linux":
        return "containers can be reached by their addresses on Linux only"
    if _an_engine_answers():
        return ""
    if os.geteuid() != 0:
        return "no Docker engine answers, and only root can start one"
    missing = [
        program
        for program in ("docker", "dockerd", "iptables", "ip", "mmdebstrap")
        if shutil.which(program) is None
    ]
    if missing:
        return f"no Docker engine answers, and to start one there is no {', '.join(missing)}"
    return ""


@contextlib.contextmanager
def engine_for_tests() -> Iterator[Engine]:
    """The engine of this machine, or one that lives as long as the block."""
    if _an_engine_answers():
        yield Engine({})
        return
    with _own_engine() as engine:
        make_images(engine)
        yield engine


def _an_engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    words = ["docker", "info", "--format", "{{.ServerVersion}}"]
    return subprocess.run(words, capture_output=True, timeout=30).returncode == 0


@contextlib.contextmanager
def _own_engine() -> Iterator[Engine]:
    folder = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/tmp"))  # a socket's path must be short
    host = f"unix://{folder}/socket"
    engine = Engine(
        {
            "DOCKER_HOST": host,
            "DOCKER_BUILDKIT": "0",  # which would be a program of its own
            "COMPOSE_PARALLEL_LIMIT": "1",  # without it builds at once do the same work
            "BASE_IMAGE": BASE_IMAGE,
            "COMPILER_IMAGE": COMPILER_IMAGE,
            "TORCH_INDEX": "",  # pip in the base image knows what pip on this machine knows
        }
    )
    try:
        with _network_as_before(), (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "dockerd",
                    "--storage-driver=overlay2",
                    f"--data-root={folder}/data",
                    f"--exec-root={folder}/exec",
                    f"--pidfile={folder}/pid",
                    f"--host={host}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                _wait_until_it_answers(engine, process, folder / "log")
                yield engine
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(5)
                    raise
    finally:
        shutil.rmtree(folder)


def _wait_until_it_answers(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            engine.docker("version")
            return
        except AssertionError:
            said = log.read_text(errors="replace")[-2000:]
            assert process.poll() is None, f"dockerd ended:\n{said}"
            assert time.monotonic() < deadline, f"dockerd does not answer:\n{said}"
            time.sleep(0.2)


@contextlib.contextmanager
def _network_as_before() -> Iterator[None]:
    """What an engine changes outside of its folders, and leaves when it ends."""
    programs = [each for each in ("iptables", "ip6tables") if shutil.which(f"{each}-save")]
    rules = {each: _output(f"{each}-save") for each in programs}
    bridges, forwarding = _bridges(), _FORWARDING.read_text()
    try:
        yield
    finally:
        for bridge in _bridges() - bridges:
            subprocess.run(["ip", "link", "delete", bridge], check=True)
        for program, before in rules.items():
            subprocess.run(
                [f"{program}-restore"], input=_with_all_tables(before), text=True, check=True
            )
        _FORWARDING.write_text(forwarding)


def _with_all_tables(rules: str) -> str:
    """Rules to be restored; a table that was not there becomes an empty one that lets all pass."""
    for table, chains in _EMPTY_TABLES.items():
        if f"*{table}\n" not in rules:
            lines = [f"*{table}", *(f":{chain} ACCEPT [0:0]" for chain in chains), "COMMIT"]
            rules += "\n".join(lines) + "\n"
    return rules


def _bridges() -> set[str]:
    lines = _output("ip", "-brief", "link", "show", "type", "bridge").splitlines()
    return {line.split()[0] for line in lines}


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
