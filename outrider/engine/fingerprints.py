"""Who a model is: a hash of its tokens and one of its weights. Needs no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.engine.config import read_json
from outrider.engine.weight_files import weight_files
from outrider.model_error import ModelError

_CHUNK_BYTES = 1 << 22


def token_table_hash(folder: Path) -> bytes:
    """SHA-256 over the ids in order of (uint32 little-endian length, UTF-8 token string).

    Ids without a token, such as the padding of the logits, are left out: two models agree if every
    id that a text can hold means the same to both.
    """
    digest = hashlib.sha256()
    for _, token in sorted(_token_table(folder).items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def num_tokens(folder: Path) -> int | None:
    """One more than the largest id that stands for a token; None without a tokenizer."""
    if not (folder / "tokenizer.json").exists():
        return None
    return max(_token_table(folder), default=-1) + 1


def _token_table(folder: Path) -> dict[int, str]:
    """Token string by id, from tokenizer.json."""
    path = folder / "tokenizer.json"
    raw = read_json(path)
    try:
        vocab = raw["model"]["vocab"]
        # By token, or, in a unigram model, [token, score] by id.
        entries = (
            vocab.items() if isinstance(vocab, dict) else ((e[0], i) for i, e in enumerate(vocab))
        )
        table = {int(i): str(token) for token, i in entries}
        for entry in raw.get("added_tokens") or ():
            table[int(entry["id"])] = str(entry["content"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"{path} holds no vocabulary that can be read: {error!r}") from error
    return table


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 in hex over config.json and the weight files."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", *weight_files(folder)):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
