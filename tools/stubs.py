"""Writes the Python stubs of protos/, or checks that the committed ones are current.

Run from the repository root: `python tools/stubs.py write|check`. The compiler is the pinned
grpcio-tools, so equal .proto files give equal bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "protos/outrider/v1"


def generate(out: Path) -> None:
    """Compile every .proto file of the contract into `out`."""
    from grpc_tools import protoc

    names = sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.proto"))
    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", f"-I{ROOT}", *flags, *names]) != 0:
        raise SystemExit("protoc failed")


def stale_stubs(fresh: Path) -> list[str]:
    """Committed stubs that differ from the fresh ones, or exist on one side only."""
    stale = []
    for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py"):
        names = {path.name for folder in (ROOT, fresh) for path in (folder / SOURCES).glob(pattern)}
        for name in sorted(names):
            sides = [folder / SOURCES / name for folder in (ROOT, fresh)]
            if not all(side.exists() for side in sides) or len({s.read_bytes() for s in sides}) > 1:
                stale.append(f"{SOURCES}/{name}")
    return stale


def main(argv: list[str]) -> int:
    """Do what the one argument says; the exit status."""
    if argv == ["write"]:
        generate(ROOT)
        return 0
    if argv != ["check"]:
        print("usage: python tools/stubs.py write|check", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = stale_stubs(Path(folder))
    for name in stale:
        print(f"stale: {name} (run `make protos`)", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
