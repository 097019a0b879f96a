"""The drafter that tests of the protocol share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.serving.settings import DraftSettings
from tests.support.draft_stream import RunningDraft, run_draft_service


@pytest.fixture
async def draft() -> AsyncIterator[RunningDraft]:
    """An n-gram drafter with room for four sequences."""
    settings = DraftSettings(port=0, max_sequences=4, max_window=16)
    async with run_draft_service(settings) as running:
        yield running
