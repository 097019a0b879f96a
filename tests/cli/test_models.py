"""`outrider models`, as far as it needs no model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from outrider.cli.main import main
from outrider.models import catalogue


def test_names_are_whole_for_whoever_reads_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pipe, whatever width the terminal behind it has."""
    monkeypatch.setenv("COLUMNS", "30")
    result = CliRunner().invoke(main, ["models", "list"])
    assert result.exit_code == 0, result.output
    assert set(catalogue.CATALOGUE) <= set(result.stdout.split())
