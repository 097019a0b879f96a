"""The bench of the gateway: its arithmetic, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gateway_overhead import Way, percentile, print_table, run
from bench.paced_stack import paced_stack
from bench.stream_clients import Arrivals
from tests.support.gateways import write_tokenizer_folder

MS = 1_000_000


def test_percentiles() -> None:
    """The smallest value that so many do not exceed."""
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 101), 50) == 50
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([7], 99) == 7


def test_the_targets_own_time_counts_for_nobody() -> None:
    """1 ms on the way there, 50 in the target, 2 ms on the way back; then 3 ms for the next."""
    way = Way()
    way.add(Arrivals("r", 0, [53 * MS, 103 * MS]), 1 * MS, [51 * MS, 100 * MS])
    assert (way.first, way.chunk) == ([3.0], [3.0])


def test_a_lost_piece_is_no_measurement() -> None:
    """It says so, rather than compare one token with another."""
    with pytest.raises(ValueError, match="zip"):
        Way().add(Arrivals("r", 0, [MS]), 0, [MS, MS])


@pytest.mark.timeout(90)
async def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over both doors and beside the target itself, every token is found again."""
    folder = write_tokenizer_folder(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    with paced_stack(str(folder), interval_ms=2.0) as stack:
        ways = await run(stack, streams=3, seconds=1.5, rounds=1)
        assert stack.rss_mb > 20
    figures = print_table(ways)
    assert set(figures) == {"target", "gRPC", "HTTP", "added by gRPC", "added by HTTP"}
    assert all(len(way.chunk) > 50 for way in ways.values())
    assert "added by HTTP" in capsys.readouterr().out
