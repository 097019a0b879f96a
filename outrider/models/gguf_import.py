"""A GGUF file as a model folder: converted once into the cache, under the hash of its bytes.

The same file is never converted twice, whatever it is called and wherever it lies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.models import store
from outrider.models.errors import FetchFailed

logger = logging.getLogger(__name__)

CONVERSION_PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class GgufSource:
    """What the cache knows a converted file by."""

    gguf_sha256: str

    @property
    def name(self) -> str:
        """The folder's name in the cache."""
        return f"gguf-{self.gguf_sha256[:24]}"


def import_gguf(path: Path) -> Path:
    """The model folder made from this file, made now if there is none yet."""
    try:
        with path.open("rb") as file:
            source = GgufSource(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise FetchFailed(f"cannot read {path}: {error.strerror}") from error
    if store.is_complete(source):
        return store.model_dir(source.name)
    require_packages()
    logger.info("converting %s into %s, once", path, store.model_dir(source.name))
    with store.building(source) as folder:
        if folder is not None:
            convert_gguf(path, folder)
    return store.model_dir(source.name)


def require_packages() -> None:
    """FetchFailed, naming what to install, where the conversion cannot run."""
    missing = [name for name in CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise FetchFailed(
            f"the conversion needs {', '.join(missing)}; run: pip install 'outrider[convert]'"
        )


def convert_gguf(
    path: Path,
    folder: Path,
    *,
    eos_token_ids: Sequence[int] | None = None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write config, tokenizer and float32 weights; FetchFailed for what is not supported.

    eos_token_ids: what ends an answer, where the file itself does not say it right.
    """
    from gguf import GGUFReader

    from outrider.models import gguf_config, gguf_weights
    from outrider.models.gguf_tokenizer import write_tokenizer

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise FetchFailed(f"{path} is not a whole GGUF file: {error}") from error
    try:
        gguf_config.write_configs(
            reader,
            folder,
            gguf_config.eos_token_ids(reader) if eos_token_ids is None else eos_token_ids,
        )
        gguf_weights.check_tensors(reader)  # before the long part
        write_tokenizer(reader, folder)
        gguf_weights.write_weights(reader, folder, on_tensor)
    except FetchFailed as error:
        raise FetchFailed(f"{path}: {error}") from error
