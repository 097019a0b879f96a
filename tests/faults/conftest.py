"""What these tests serve: a tiny random model, or a tokenizer alone before a scripted target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateways import write_tokenizer_folder
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 384


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with 384 ids and a context of 512 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("folders") / "tiny")
