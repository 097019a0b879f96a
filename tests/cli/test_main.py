"""The command as a whole: its help, its exit statuses, completion by the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from outrider.cli.main import COMMANDS, main
from outrider.serving.settings import OTHER_VARIABLES


def words(*arguments: str) -> str:
    """The output of the command, spaces made one."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str) -> None:
    """Each one in the list can be imported and says what it does, also in the list."""
    assert "Usage: main " + command in words(command, "--help")
    assert COMMANDS[command][2] in words("--help")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_exit_statuses_are_in_the_help(command: str) -> None:
    """Who writes a script finds them where the flags are."""
    text = words(command, "--help")
    for status in ("0 answered", "2 wrong usage", "3 no gateway", "5 too busy", "130 interrupted"):
        assert status in text
    assert "0 done; 1 failed" in words("--help")
    assert "Exit status: 0" in words("doctor", "--help")


def test_an_interrupt_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status of any other interrupt, and no traceback."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.main.importlib", SimpleNamespace(import_module=interrupted))
    result = CliRunner().invoke(main, ["up"])
    assert (result.exit_code, result.output) == (130, "")


def complete(**variables: str) -> str:
    """What the program prints for a shell."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_grpcs_core_writes_no_lines_of_its_own() -> None:
    """A service's lines are JSON, and the last words say what was in its way."""
    arguments = ["draft", "--host=300.1.1.1", "--port=0", "--metrics-port=-1"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *arguments], capture_output=True, text=True, timeout=30
    )
    *lines, last = done.stderr.splitlines()
    assert (done.returncode, last.partition(" on ")[0]) == (1, "Error: draft: cannot listen")
    (entry,) = [json.loads(line) for line in lines]
    assert (entry["event"], entry["proposer"]) == ("drafting", "ngram")
    assert "model" not in entry  # n-grams need none


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """Each shell's script is printed, for the command's own name."""
    script = complete(_OUTRIDER_COMPLETE=f"{shell}_source")
    assert "_OUTRIDER_COMPLETE" in script
    assert "complete" in script


def test_completion_knows_commands_and_flags() -> None:
    """Subcommands complete, and so do flags made from settings."""
    ask = {"_OUTRIDER_COMPLETE": "bash_complete"}
    commands = complete(**ask, COMP_WORDS="outrider d", COMP_CWORD="1")
    assert {"plain,doctor", "plain,draft"} <= set(commands.split())
    flags = complete(**ask, COMP_WORDS="outrider target --max-wai", COMP_CWORD="2")
    assert flags.split() == ["plain,--max-waiting"]


def test_variables_that_are_no_setting_are_in_the_help() -> None:
    """Each one that is accepted, with what it is for."""
    text = words("--help")
    for name, about in OTHER_VARIABLES.items():
        assert f"{name} {about}" in text


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["target", "--port=0", "--metrics-port=-1"], "target"),
        (
            ["draft", "--port=0", "--metrics-port=-1", "--proposer=model", "--model=x"],
            "draft-model",
        ),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(arguments: list[str], extra: str) -> None:
    """One line, no traceback, also where the package is only needed by the proposer."""
    code = f"""
import sys
sys.modules["torch"] = None  # as if it was not installed
from outrider.cli.main import main
main({arguments!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert f"needs the package torch; run: pip install 'outrider[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
