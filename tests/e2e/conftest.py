"""The tiny random model for tests that need services but no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with 384 ids and a context of 512 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
