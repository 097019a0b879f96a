"""Which files of a model folder hold its weights. Needs no torch.

A folder may hold others as well, such as the same weights in another layout: they do not count.
"""

from __future__ import annotations

from pathlib import Path

from outrider.engine.config import read_json
from outrider.model_error import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The single file, or the index's shards in a fixed order; ModelError if one is missing."""
    paths = _shards(folder) if (folder / INDEX_FILE).exists() else [folder / SINGLE_FILE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing == [SINGLE_FILE]:
        raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:5])}, of which {INDEX_FILE} speaks")
    return paths


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside or not names:
        raise ModelError(f"{index}: not a list of files beside it {outside}")
    return [folder / name for name in sorted(names)]
