"""What `--model` takes: a folder, a GGUF file, a name of the catalogue, or a hub's org/name."""

from __future__ import annotations

from pathlib import Path

from outrider.models import catalogue, store
from outrider.models.errors import NotFetched, UnknownModel
from outrider.models.gguf_import import import_gguf
from outrider.models.hub import HubModel


def resolve(model: str, *, weights: bool = True) -> Path:
    """The model's folder on this machine. May convert a GGUF file or download from a hub.

    weights: whether they are needed; a tokenizer alone is a small download.
    """
    if model in catalogue.CATALOGUE:
        entry = catalogue.find(model)
        if not store.is_complete(entry):
            raise NotFetched(
                f"{entry.name} is not in {store.cache_dir()}; "
                f"run: outrider models fetch {entry.name}"
            )
        return store.model_dir(entry.name)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_file() and path.suffix == ".gguf":
        return import_gguf(path.resolve())
    hub_model = None if path.exists() else HubModel.parse(model)
    if hub_model is not None:
        return hub_model.fetch(weights=weights)
    raise UnknownModel(
        f"{model!r} is neither a model folder (one with a config.json), nor a .gguf file, nor "
        "org/name[@revision] on a hub, nor one of: " + ", ".join(sorted(catalogue.CATALOGUE))
    )


def display_name(model: str) -> str:
    """What people call the model that `resolve` would give."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    hub_model = None if path.exists() else HubModel.parse(model)
    if hub_model is not None:
        return hub_model.repository
    return path.resolve().name or model
