"""A model folder appears whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from outrider.models import store
from outrider.models.catalogue import SMOLLM2_135M_INSTRUCT as ENTRY
from outrider.models.errors import NotFetched, UnknownModel
from outrider.models.resolve import resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def fill(folder: Path) -> None:
    """Stands for a conversion."""
    (folder / "config.json").write_text("{}")


def test_a_finished_build_is_there_and_is_not_repeated(cache: Path) -> None:
    """After one build the folder is complete and resolves; a second build is told so."""
    with store.building(ENTRY) as folder:
        assert folder is not None
        fill(folder)
        assert not store.is_complete(ENTRY)
    assert store.is_complete(ENTRY)
    assert resolve(ENTRY.name) == cache / "models" / ENTRY.name
    with store.building(ENTRY) as folder:
        assert folder is None


def test_an_interruption_leaves_nothing(cache: Path) -> None:
    """An error in the middle, Ctrl-C included, removes the partial folder."""
    with pytest.raises(KeyboardInterrupt), store.building(ENTRY) as folder:
        assert folder is not None
        fill(folder)
        raise KeyboardInterrupt
    assert [path.name for path in (cache / "models").iterdir()] == [f".{ENTRY.name}.lock"]


def test_what_a_killed_process_left_is_swept_away(cache: Path) -> None:
    """SIGKILL frees the lock and leaves a partial folder; the next build removes it and works."""
    code = """
        import os, signal
        from outrider.models import store
        from outrider.models.catalogue import SMOLLM2_135M_INSTRUCT as entry
        with store.building(entry) as folder:
            (folder / "half").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=30, env=dict(os.environ))
    assert len(list((cache / "models").glob(".*partial*"))) == 1
    with store.building(ENTRY) as folder:
        assert folder is not None
        fill(folder)
    assert list((cache / "models").glob(".*partial*")) == []
    assert store.is_complete(ENTRY)


def test_two_at_once_build_once(cache: Path) -> None:
    """Of several processes that fetch together one builds, the others wait and find it done."""
    code = """
        import time
        from outrider.models import store
        from outrider.models.catalogue import SMOLLM2_135M_INSTRUCT as entry
        with store.building(entry) as folder:
            if folder is not None:
                time.sleep(0.5)
                (folder / "config.json").write_text("{}")
                print("built")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [child.communicate(timeout=30)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sorted(said) == ["", "", "built\n"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", ""),
        (store.MANIFEST, ""),
        (store.MANIFEST, "[]"),
        (store.MANIFEST, '{"files": {}}'),
    ],
)
def test_a_damaged_folder_is_made_again(cache: Path, file: str, text: str) -> None:
    """A file or manifest that was cut or written over makes the folder one that is built anew."""
    with store.building(ENTRY) as folder:
        assert folder is not None
        fill(folder)
    (store.model_dir(ENTRY.name) / file).write_text(text)
    assert not store.is_complete(ENTRY)
    with store.building(ENTRY) as folder:
        assert folder is not None
        fill(folder)
    assert store.is_complete(ENTRY)


def test_resolving_says_what_to_do(cache: Path, tmp_path: Path) -> None:
    """Known but absent names the command; a folder of one's own works; nonsense names both."""
    with pytest.raises(NotFetched, match=f"outrider models fetch {ENTRY.name}"):
        resolve(ENTRY.name)
    own = tmp_path / "own"
    own.mkdir()
    fill(own)
    assert resolve(str(own)) == own
    with pytest.raises(UnknownModel, match="neither a model folder"):
        resolve("no-such-model")
