"""Writes the table of registers, spills and shared memory in docs/kernels.md.

Run as `python -m tests.kernels.triton.resources`: compiles every listed form, which takes minutes;
with `--new` only those that have no line yet.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from outrider_kernels.triton_ops.configs import all_variants
from outrider_kernels.triton_ops.variant import Variant

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"
CHIPS = ("sm_80", "sm_90")
WORKERS = 2


def row(variant: Variant) -> str:
    """One form's line: for each chip registers of a thread, bytes spilled, bytes shared."""
    from tests.kernels.triton.aot import compile_for

    cells = [f"`{variant.name}`", f"{variant.num_warps}"]
    for chip in CHIPS:
        compiled = compile_for(variant, chip)
        cells += [f"{compiled.registers} / {compiled.spilled}", f"{compiled.shared}"]
    return "| " + " | ".join(cells) + " |"


def listed() -> dict[str, str]:
    """Lines of the table as it is, by their forms' names, in order."""
    lines = _parts(PAGE.read_text())[1].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def main() -> None:
    """Replace the part between the markers."""
    chips = " | ".join(f"{chip} registers / spilled | {chip} shared" for chip in CHIPS)
    before, _, after = _parts(PAGE.read_text())
    known = listed() if "--new" in sys.argv else {}
    missing = [variant for variant in all_variants() if variant.name not in known]
    with ProcessPoolExecutor(WORKERS) as pool:
        for variant, line in zip(missing, pool.map(row, missing), strict=True):
            print(line, flush=True)
            known[variant.name] = line
    head = [f"| form | warps | {chips} |", "|---" * (2 + 2 * len(CHIPS)) + "|"]
    table = "\n".join([*head, *(known[variant.name] for variant in all_variants())])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _parts(page: str) -> tuple[str, str, str]:
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


if __name__ == "__main__":
    main()
