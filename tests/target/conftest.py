"""Logs are caught: the default way to show an exception takes longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def log_entries() -> Iterator[list]:
    """What the test has logged."""
    with structlog.testing.capture_logs() as entries:
        yield entries
