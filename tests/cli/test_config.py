"""Settings from a file: where each value comes from, and that mistakes in it are named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outrider.cli.main import main
from outrider.cli.options import SERVICES
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings


def config(*arguments: str, **environment: str) -> Result:
    """`outrider config` with these arguments and variables."""
    return CliRunner().invoke(main, ["config", *arguments], env=environment)


def line_of(output: str, service: str, key: str) -> list[str]:
    """The words of one setting's line."""
    table = output.split(f"[{service}]")[1].split("\n[")[0]
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [key])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file with values of several types."""
    path = tmp_path / "outrider.toml"
    path.write_text(
        '[gateway]\nserved_name = "small"\n\n'
        "[target]\nmax_waiting = 7\ndraft_wait_ms = 5\nprefix_cache = false\nport = 7002\n"
    )
    return path


def test_flag_over_variable_over_file_over_default(file: Path) -> None:
    """Each source wins over the next one, and the output says which it was."""
    variables = {"OUTRIDER_TARGET_PORT": "7003", "OUTRIDER_TARGET_MAX_WAITING": "8"}
    output = config(f"--config={file}", "--target-port=7004", **variables).output
    assert line_of(output, "target", "port") == ["port", "7004", "flag", "--target-port"]
    where = ["variable", "OUTRIDER_TARGET_MAX_WAITING"]
    assert line_of(output, "target", "max_waiting") == ["max_waiting", "8", *where]
    assert line_of(output, "target", "draft_wait_ms") == ["draft_wait_ms", "5.0", "file", str(file)]
    assert line_of(output, "target", "prefix_cache")[1] == "false"
    assert line_of(output, "gateway", "served_name")[1] == '"small"'
    assert line_of(output, "draft", "port") == ["port", "50053", "default"]


def test_a_file_by_flag_before_or_behind_the_command_or_by_variable(file: Path) -> None:
    """All ways to name the file give the same; the flag wins over the variable."""
    behind = config(f"--config={file}").output
    before = CliRunner().invoke(main, [f"--config={file}", "config"]).output
    variable = config(OUTRIDER_CONFIG=str(file)).output
    both = config(f"--config={file}", OUTRIDER_CONFIG="/nothing/here").output
    assert "small" in behind
    assert behind == before == variable == both
    assert "small" not in config().output


@pytest.mark.parametrize(
    ("command", "flag"), [("target", "--max-waiting"), ("up", "--target-max-waiting")]
)
def test_services_take_their_settings_from_the_file(file: Path, command: str, flag: str) -> None:
    """A service and `up` see the file: a value outside its limits is found, a flag replaces it."""
    file.write_text("[target]\nmax_waiting = 7\nthreads = 0\nport = 1\n")
    port = flag.replace("max-waiting", "port")
    result = CliRunner().invoke(main, [command, f"--config={file}", port, "70000"])
    assert (result.exit_code, "port must be at most 65535" in result.output) == (2, True)
    file.write_text("[target]\nmax_waiting = -7\n")
    result = CliRunner().invoke(main, [command, f"--config={file}", port, "1"])
    assert result.exit_code == 2
    assert "[target] max_waiting must be at least 0, got -7" in result.output


def test_the_toml_output_gives_the_same_settings_again(file: Path) -> None:
    """What --toml prints is a file with every setting of every service."""
    first = config("--toml", f"--config={file}", '--gateway-served-name=a "b" \\ ü\x7f').output
    tables = tomllib.loads(first)
    assert set(tables) == set(SERVICES)
    assert GatewaySettings(**tables["gateway"]).served_name == 'a "b" \\ ü\x7f'
    assert TargetSettings(**tables["target"]).draft_wait_ms == 5.0
    assert DraftSettings(**tables["draft"]) == DraftSettings()
    file.write_text(first)
    assert tomllib.loads(config("--toml", f"--config={file}").output) == tables


def test_the_toml_output_is_toml_whatever_the_files_name(tmp_path: Path) -> None:
    """It stands in comments, which a line break would end."""
    file = tmp_path / "a\nb\x1b.toml"
    file.write_text("[target]\nmax_waiting = 7\n")
    assert tomllib.loads(config("--toml", f"--config={file}").output)["target"]["max_waiting"] == 7


def test_a_setting_that_is_no_text() -> None:
    """Bytes that are no UTF-8 fit neither a file nor a message."""
    result = config("--gateway-model=\udce9")
    assert result.exit_code == 2
    assert "gateway-model must be text in UTF-8" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tarket]\n", "unknown table [tarket]; did you mean target?"),
        ("[target]\nmax_wating = 3\n", "[target] unknown key max_wating; did you mean max_waiting"),
        ("[draft]\nzzz = 3\n", "unknown key zzz; there are: "),
        ("target = 3\n", "target must be a table"),
        ('[target]\nport = "7"\n', "[target] port must be a whole number, got '7'"),
        ("[target]\nport = true\n", "[target] port must be a whole number, got True"),
        ("[target]\nport = 7.0\n", "[target] port must be a whole number, got 7.0"),
        ("[target]\ndraft_wait_ms = false\n", "[target] draft_wait_ms must be a number"),
        ("[target]\nprefix_cache = 1\n", "[target] prefix_cache must be true or false, got 1"),
        ("[gateway]\ntargets = 7\n", "[gateway] targets must be a string"),
        ("[target\n", "outrider.toml: "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    """Unknown names and wrong types are usage errors with the file, the key and the nearest one."""
    path = tmp_path / "outrider.toml"
    path.write_text(text)
    result = config(f"--config={path}")
    assert result.exit_code == 2
    assert str(path) in result.output
    assert message in result.output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is an error and not an empty one."""
    result = config(f"--config={tmp_path / 'none.toml'}")
    assert result.exit_code == 2
    assert "none.toml: No such file" in result.output
