"""Writes the list of files in ARCHITECTURE.md from the first sentence of each file's docstring.

Run from anywhere: `python tools/filelist.py`. The part between the two markers is replaced.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- files: begin -->", "<!-- files: end -->"
FOLDERS = (
    "gateway",
    "target_service",
    "draft_service",
    "outrider",
    "kernels",
    "bench",
    "tools",
)


def first_sentence(path: Path) -> str:
    """Up to the first full stop, colon lists included; empty for a file without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def file_list() -> str:
    """One table a folder."""
    lines = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if about := first_sentence(path):
                lines.append(f"| `{path.relative_to(ROOT)}` | {about} |")
    return "\n".join(["| file | what it is |", "|---|---|", *lines])


def main() -> None:
    """Replace the part between the markers."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{file_list()}\n{END}{after}")


if __name__ == "__main__":
    main()
