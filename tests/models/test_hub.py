"""`--model org/name@revision`, against a hub of the test's own.

huggingface_hub reads its settings once, at import, so each look is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.models.hub import HubModel
from outrider.models.resolve import display_name
from tests.support.fake_hub import FakeHub, commit_of, fake_hub
from tests.support.tiny_models import make_tiny_model

LOOK = """
import sys
from outrider.model_error import ModelError
from outrider.models.resolve import resolve
try:
    print(resolve(sys.argv[1], weights=sys.argv[2] == "weights"))
except ModelError as error:
    print(f"{type(error).__name__}: {error}")
assert "torch" not in sys.modules
"""


class Looker:
    """Resolves names in fresh processes that share a cache."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self.home = home

    def __call__(self, name: str, *, weights: bool = True, **variables: str) -> str:
        """The folder that a name resolves to, or the error."""
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            **variables,
        }
        command = [sys.executable, "-c", LOOK, name, "weights" if weights else "tokenizer"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Looker]:
    """A hub with one repository of two revisions, and files that must never be downloaded."""
    root = tmp_path / "hub"
    for seed, revision in enumerate(("main", "v2")):
        folder = make_tiny_model(root / "acme" / "tiny" / revision, seed=seed)
        (folder / "modeling_tiny.py").write_text("raise SystemExit")
        (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with fake_hub(root) as hub:
        yield Looker(hub, tmp_path / "home")


@pytest.mark.timeout(120)
def test_a_model_is_downloaded_once_and_then_found_offline(look: Looker) -> None:
    """Only JSON, template and safetensors travel; later looks need no file, and no hub."""
    folder = Path(look("acme/tiny"))
    source = look.hub.root / "acme" / "tiny" / "main"
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert {name.rpartition(".")[2] for name in look.hub.downloads} == {
        "json", "safetensors", "jinja"
    }  # fmt: skip
    look.hub.downloads.clear()
    assert look("acme/tiny") == str(folder)
    assert look("acme/tiny", HF_HUB_OFFLINE="1") == str(folder)
    assert look("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9") == str(folder)
    assert look.hub.downloads == []


@pytest.mark.timeout(120)
def test_a_revision_is_another_folder(look: Looker) -> None:
    """A branch, and the commit that it stands for; an unknown one is named."""
    main = look("acme/tiny")
    v2 = look("acme/tiny@v2")
    assert main != v2
    assert look(f"acme/tiny@{commit_of(look.hub.root / 'acme' / 'tiny' / 'v2')}") == v2
    assert look("acme/tiny@v3") == "UnknownModel: acme/tiny has no revision 'v3'"


@pytest.mark.timeout(120)
def test_a_tokenizer_alone_leaves_the_weights_where_they_are(look: Looker) -> None:
    """The gateway's download is small, and a later one with weights adds them."""
    folder = look("acme/tiny", weights=False)
    assert "model.safetensors" not in look.hub.downloads
    assert "not whole" in look("acme/tiny", HF_HUB_OFFLINE="1")
    assert look("acme/tiny") == folder
    assert (Path(folder) / "model.safetensors").exists()


@pytest.mark.timeout(120)
def test_errors_say_what_to_do(look: Looker) -> None:
    """Not there, gated, offline, unreachable, pickled: each names the model and the remedy."""
    assert "check the spelling" in look("acme/huge")
    assert "HF_TOKEN" in look("acme/huge")
    offline = look("acme/tiny", HF_HUB_OFFLINE="1")
    assert offline.startswith("NotFetched: acme/tiny is not whole")
    assert "HF_HUB_OFFLINE is set" in offline
    assert "cannot be reached" in look("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    look.hub.gated.add("acme/tiny")
    assert "accept its terms" in look("acme/tiny")
    look.hub.gated.clear()
    (look.hub.root / "acme" / "tiny" / "main" / "model.safetensors").unlink()
    assert "pickled ones (.bin, .pt) are never loaded" in look("acme/tiny")


def test_spelling() -> None:
    """org/name with or without a revision; paths and bare names are something else."""
    assert HubModel.parse("org/name") == HubModel("org/name", None)
    assert HubModel.parse("org/na-me.2@refs/pr/1") == HubModel("org/na-me.2", "refs/pr/1")
    for text in ("name", "/org/name", "./org/name", "a/b/c", "org/name@", "../name", "org/"):
        assert HubModel.parse(text) is None
    assert display_name("org/name@v2") == "org/name"


def test_a_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path that looks like org/name is the folder, if there is one."""
    from outrider.models.resolve import resolve

    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text(json.dumps({}))
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == tmp_path / "org" / "name"
    assert display_name("org/name") == "name"
