"""What the demo concludes from two runs of each prompt."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from outrider.cli import demo
from outrider.client.answers import Finish


def answer(token_ids: list[int], seconds: float, drafted: int = 0, accepted: int = 0):
    """An answer as `ask` returns it."""
    finish = Finish(0, "stop", 3, len(token_ids), 7, 1, drafted, accepted)
    return demo.Answer(token_ids, "text", seconds, finish)


SAME = (answer([1, 2, 3, 4], 2.0), answer([1, 2, 3, 4], 1.0, drafted=3, accepted=2))
OTHER = (answer([1, 2, 3, 4], 2.0), answer([1, 2, 3, 5], 1.0))


def test_the_last_line_has_the_agreed_keys() -> None:
    """Counts, rates over whole requests, and whether all ids are equal."""
    assert demo.summary_of({"a": SAME, "b": SAME}) == {
        "prompts": 2,
        "same_tokens": True,
        "tokens_per_s_off": 2.0,
        "tokens_per_s_on": 4.0,
        "drafted": 6,
        "accepted": 4,
    }


def test_the_closing_line_says_how_prompts_differ() -> None:
    """The slowest and the fastest, by name."""
    slower = (answer([1, 2], 1.0), answer([1, 2], 2.0, drafted=3))
    assert demo.verdict({"a": SAME, "b": slower, "c": SAME}) == (
        "The same tokens; from 0.50 (b) to 2.00 (a) times the speed. Both runs are in out/demo/."
    )
    assert "no draft was used" in demo.verdict({"a": (SAME[0], SAME[0])})


def test_one_other_token_is_seen() -> None:
    """A single difference in a single prompt fails the whole demo, and the table says where."""
    runs = {"a": SAME, "b": OTHER}
    summary = demo.summary_of(runs)
    assert summary["same_tokens"] is False
    assert "differ" in demo.verdict(runs)
    text = io.StringIO()
    Console(file=text, width=demo.TABLE_WIDTH).print(demo.table_of(runs))
    assert text.getvalue().count("yes") == 1 and text.getvalue().count("NO") == 1


def test_both_id_lists_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """off.json and on.json hold the ids of every prompt."""
    monkeypatch.setattr(demo, "OUT", tmp_path)
    demo.save({"question": OTHER})
    kept = [json.loads((tmp_path / f"{side}.json").read_text()) for side in ("off", "on")]
    assert [side["question"]["token_ids"] for side in kept] == [[1, 2, 3, 4], [1, 2, 3, 5]]
