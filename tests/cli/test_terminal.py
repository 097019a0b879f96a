"""Terminals that cannot show every character: nothing fails, what they cannot show is escaped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.scripted_gateway import scripted_gateway

pytestmark = pytest.mark.timeout(60)

TEXT = "gr\u00fc\u00df \u20ac \U0001f600"
ESCAPED = "gr\\u00fc\\u00df \\u20ac \\ud83d\\ude00"


def run(*arguments: str, encoding: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The command with all three streams in this encoding."""
    return subprocess.run(
        [sys.executable, "-m", "outrider", *arguments],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        input=stdin,
        capture_output=True,
        timeout=50,
    )


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_answers_are_escaped_where_they_cannot_be_shown(command: str) -> None:
    """Text, on a terminal in ASCII; a prompt in UTF-8 gets through all the same."""
    with scripted_gateway() as script:
        script.words = ("Good ", TEXT)
        arguments = [command, f"--address={script.address}"]
        arguments += ["-"] if command == "generate" else []
        done = run(*arguments, encoding="ascii", stdin=TEXT.encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").rstrip() == f"Good {ESCAPED}"
    request = script.request
    assert (request.text or request.chat.messages[0].content) == TEXT


def test_a_terminal_shows_what_it_can() -> None:
    """Latin-1 has the first two of the four."""
    with scripted_gateway() as script:
        script.words = ("", TEXT)
        done = run("generate", f"--address={script.address}", "Hi", encoding="latin-1")
    assert done.stdout.decode("latin-1") == f"gr\u00fc\u00df{ESCAPED[14:]}\n"


def test_json_stays_json() -> None:
    """The escapes are those of JSON."""
    with scripted_gateway() as script:
        script.words = ("", TEXT)
        done = run("generate", f"--address={script.address}", "--json", "Hi", encoding="ascii")
    lines = [json.loads(line) for line in done.stdout.decode("ascii").splitlines()]
    assert lines[1]["text"] == TEXT


def test_toml_stays_toml() -> None:
    """Its escapes are JSON's, but for characters that JSON makes of two."""
    done = run("config", "--toml", f"--gateway-served-name={TEXT}", encoding="ascii")
    assert tomllib.loads(done.stdout.decode("ascii"))["gateway"]["served_name"] == TEXT


@pytest.mark.parametrize("command", ["generate", "config", "models", "help"])
def test_a_full_disk_is_told_in_one_line(command: str) -> None:
    """And in the exit status; whoever writes, and whether it is noticed now or at the end."""
    with scripted_gateway() as script, open("/dev/full", "w") as full:
        arguments = {
            "generate": ["generate", f"--address={script.address}", "Hi"],
            "models": ["models", "list"],
            "help": ["--help"],
        }.get(command, [command])
        done = subprocess.run(
            [sys.executable, "-m", "outrider", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
        )
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["config", f"--gateway-served-name={TEXT}"], 0),
        (["models", "list"], 0),
        (["models", "path", TEXT], 1),
        (["gateway", f"--model=/nothing/{TEXT}", "--metrics-port=-1"], 1),
        (["generate", "--address=127.0.0.1:1", TEXT], 3),
        ([TEXT], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].isascii() else None,
)
def test_every_output_is_ascii(arguments: list[str], status: int) -> None:
    """Results and errors, whoever prints them, with the exit status that they have elsewhere."""
    done = run(*arguments, encoding="ascii")
    assert done.returncode == status, done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert b"Traceback" not in done.stderr


def test_bytes_that_are_no_text_are_refused_and_shown(tmp_path: Path) -> None:
    """Python keeps them as surrogates, which even UTF-8 cannot show."""
    done = run("generate", "-", encoding="utf-8", stdin=b"\xff")
    assert done.returncode == 2
    assert b"must be text in UTF-8" in done.stderr
    done = run("config", f"--config={tmp_path}/\udcff", encoding="utf-8")
    assert done.returncode == 2
    assert b"\\udcff" in done.stderr
