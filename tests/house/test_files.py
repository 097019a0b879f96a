"""How large source files may get, and that nothing is forgotten by the packaging."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("outrider", "target_service", "draft_service", "gateway", "kernels", "tools", "bench")
SOFT_LINES, HARD_LINES = 250, 400  # of a file
SOFT_FUNCTION_LINES, HARD_FUNCTION_LINES = 60, 80


def source_files() -> list[Path]:
    """Every Python file that people wrote, tests left out."""
    return [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def test_files_stay_small() -> None:
    """No source file is over the hard limit; a file over the soft one is named in the report."""
    lengths = {path: len(path.read_text().splitlines()) for path in source_files()}
    for path, length in lengths.items():
        if SOFT_LINES < length <= HARD_LINES:
            print(f"{path.relative_to(ROOT)}: {length} lines, over the soft limit of {SOFT_LINES}")
    too_long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > HARD_LINES}
    assert too_long == {}


def test_functions_stay_small() -> None:
    """No function is over the hard limit; one over the soft limit is named in the report."""
    too_long = {}
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{path.relative_to(ROOT)}: {node.name}"
            if length > HARD_FUNCTION_LINES:
                too_long[name] = length
            elif length > SOFT_FUNCTION_LINES:
                print(f"{name} has {length} lines, over the soft limit of {SOFT_FUNCTION_LINES}")
    assert too_long == {}


def test_source_files_say_what_they_are() -> None:
    """Every source file with code in it begins with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if (text := path.read_text().strip()) and not text.startswith('"""')
    ]
    assert silent == []


def test_every_package_is_typed_and_shipped() -> None:
    """Each shipped package exists and carries py.typed."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [p for p in packages if not (ROOT / p / "py.typed").exists()] == []


def test_constraints_pin_exact_versions_without_indexes() -> None:
    """constraints.txt holds nothing but `name==version`: where packages come from is pip's."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins and all(line.count("==") == 1 and "/" not in line for line in pins)


def test_the_architecture_page_names_every_file() -> None:
    """ARCHITECTURE.md has a line for each source file and none for a file that is gone."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    existing = {str(path.relative_to(ROOT)) for path in source_files() if path.read_text().strip()}
    assert listed == existing, "run `make filelist`"
