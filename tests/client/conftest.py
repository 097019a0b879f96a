"""The small tokenizer folder of a gateway that the client asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateways import write_tokenizer_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")
