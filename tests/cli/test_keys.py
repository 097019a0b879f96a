"""`outrider keys`: keys that a gateway takes, files that are never half written, plain errors."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.key_file import read_key_file
from gateway.keys import LIMITS, Keys, key_hash, parse_keys
from outrider.cli.main import main


def keys(*arguments: object) -> Result:
    """`outrider keys` with these arguments."""
    return CliRunner().invoke(main, ["keys", *map(str, arguments)])


def in_file(path: Path) -> Keys:
    """What a gateway would read there."""
    return parse_keys(read_key_file(path))


def test_a_new_key(tmp_path: Path) -> None:
    """256 random bits, alone on standard output; the file has their hash and is the owner's."""
    path = tmp_path / "keys.toml"
    result = keys("new", "alice", "--file", path)
    assert result.exit_code == 0, result.output
    key = result.stdout.removesuffix("\n")
    assert re.fullmatch(r"or-[A-Za-z0-9_-]{43}", key)
    assert [(each.name, each.sha256) for each in in_file(path)] == [("alice", key_hash(key))]
    assert key not in path.read_text()
    assert key not in result.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.toml"]


def test_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file is named it is keys.toml."""
    monkeypatch.chdir(tmp_path)
    assert keys("new", "alice").exit_code == 0
    assert [key.name for key in in_file(Path("keys.toml"))] == ["alice"]


def test_all_limits(tmp_path: Path) -> None:
    """Each limit of a key has a flag; what is not given is not in the file."""
    path = tmp_path / "keys.toml"
    values = {name: high for name, (_, high) in LIMITS.items()}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    assert keys("new", "a", "--file", path, *flags).exit_code == 0
    assert keys("new", "b", "--file", path, "--priority=-100").exit_code == 0
    a, b = in_file(path)
    assert {name: getattr(a, name) for name in LIMITS} == values
    assert (b.priority, b.max_tokens) == (-100, None)


@pytest.mark.parametrize("before", ["# ours\n", "# ours", "keys = []"])
def test_what_is_there_stays(before: str, tmp_path: Path) -> None:
    """Comments, order and rights stay; a symlink stays one; what has no place for more is told."""
    path, link = tmp_path / "real" / "keys.toml", tmp_path / "keys.toml"
    path.parent.mkdir()
    path.write_text(before)
    path.chmod(0o640)
    link.symlink_to(path)
    result = keys("new", "a", "--file", link)
    assert link.is_symlink()
    assert path.read_text().startswith(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == ["keys.toml"]
    if before.startswith("#"):
        assert [key.name for key in in_file(path)] == ["a"]
    else:
        assert (result.exit_code, path.read_text()) == (1, before)
        assert "not TOML" in result.output


def test_several_at_once(tmp_path: Path) -> None:
    """Commands that run side by side lose none of each other's keys."""
    path = tmp_path / "keys.toml"
    names = {f"k{number}" for number in range(4)}
    command = [sys.executable, "-m", "outrider", "keys", "new", "--file", str(path)]
    running = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in names]
    printed = {key_hash(each.communicate(timeout=18)[0].decode().strip()) for each in running}
    assert [each.returncode for each in running] == [0] * 4
    found = in_file(path)
    assert ({key.name for key in found}, {key.sha256 for key in found}) == (names, printed)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["new", "a"], 1, "has a key called a already"),
        (["new", "two words"], 2, "Invalid value for NAME: must be 1 to 32 letters"),
        (["new", "b", "--priority=101"], 2, "'--priority': 101 is not in the range -100<=x<=100"),
        (["new", "b", "--max-tokens=0"], 2, "'--max-tokens': 0 is not in the range"),
        (["new"], 2, "Missing argument 'NAME'"),
    ],
)
def test_what_cannot_be_added(
    arguments: list[str], status: int, message: str, tmp_path: Path
) -> None:
    """The reason, no key, and a file that is as it was."""
    path = tmp_path / "keys.toml"
    assert keys("new", "a", "--file", path).exit_code == 0
    before = path.read_text()
    result = keys(*arguments, "--file", path)
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in result.stderr
    assert path.read_text() == before


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """One line with the file and the reason, from each command; a bad file is not made worse."""
    bad = tmp_path / "bad.toml"
    bad.write_text('[[keys]]\nname = "a"\n')
    for arguments in (["check", bad], ["list", bad], ["new", "b", "--file", bad]):
        result = keys(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        reason = "sha256 must be 64 hexadecimal digits, the hash of the key"
        assert result.stderr == f"Error: {bad}: entry 1 (a): {reason}\n"
    assert bad.read_text() == '[[keys]]\nname = "a"\n'
    missing = tmp_path / "none" / "keys.toml"
    for arguments in (["check", missing], ["list", missing], ["new", "b", "--file", missing]):
        result = keys(*arguments)
        assert result.exit_code == 1
        assert result.stderr == f"Error: {missing}: No such file or directory\n"


def test_check_and_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are; names and limits, whole, and no hashes."""
    monkeypatch.setenv("COLUMNS", "30")
    path = tmp_path / "keys.toml"
    keys("new", "a-rather-long-name-of-a-customer", "--file", path, "--tokens-per-minute=123456789")
    assert keys("check", path).stdout == f"{path}: 1 key\n"
    keys("new", "b", "--file", path)
    assert keys("check", path).stdout == f"{path}: 2 keys\n"
    result = keys("list", path)
    assert {"a-rather-long-name-of-a-customer", "b", "123456789", *LIMITS} <= set(
        result.stdout.split()
    )
    assert not any(key.sha256.hex()[:16] in result.stdout for key in in_file(path))
