"""The page about the kernels of GPUs knows every form that a launcher can choose."""

from __future__ import annotations

from pathlib import Path

from outrider_kernels.triton_ops.configs import all_variants

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_the_table_of_resources_names_every_form() -> None:
    """One line for each, none for a form that is gone, and nothing that is spilled."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = {line.split("`")[1]: line.split(" | ")[2:] for line in lines if " / " in line}
    names = {variant.name for variant in all_variants()}
    assert set(rows) == names, "run `python -m tests.kernels.triton.resources`"
    assert {cells[i].split(" / ")[1] for cells in rows.values() for i in (0, 2)} == {"0"}
