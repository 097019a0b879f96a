"""The bench of choosing a token: its rows, and a run on a small vocabulary."""

from __future__ import annotations

import json

import pytest
import torch

from bench.choosing import KINDS, SETTINGS, measure, rows_of
from tests.support.implementations import library


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_always_the_same(kind: str) -> None:
    """Two runs of the bench choose from the same numbers, of another row each."""
    rows = rows_of(kind, 500)
    assert torch.equal(rows, rows_of(kind, 500))
    assert rows.shape == (8, 500) and not torch.equal(rows[0], rows[1])


def test_models_rows_are_steep() -> None:
    """In a model's row few ids are near the best; in the flat ones many are."""
    near = {kind: (rows := rows_of(kind, 5000)) > rows.amax(1, keepdim=True) - 8 for kind in KINDS}
    assert near["models"].sum() < near["normal"].sum() / 2


def test_every_setting_is_measured() -> None:
    """Each vocabulary and kind of rows has a time for each setting."""
    library("generic")
    found = json.loads(json.dumps(measure(2, vocabularies=[300, 600])))
    assert list(found) == ["300", "600"]
    for by_kind in found.values():
        assert list(by_kind) == list(KINDS)
        assert all(list(times) == list(SETTINGS) for times in by_kind.values())
        assert all(us > 0 for times in by_kind.values() for us in times.values())
