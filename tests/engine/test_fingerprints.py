"""Fingerprints: equal for what is interchangeable, different for what is not."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.config import ModelConfig, ModelError
from outrider.engine.fingerprints import num_tokens, token_table_hash, weights_fingerprint
from outrider.engine.weight_files import weight_files
from tests.support.tiny_models import make_tiny_model, save_tokenizer


def test_token_table_hash_is_what_the_protocol_says(tmp_path: Path) -> None:
    """SHA-256 over (uint32 little-endian length, UTF-8 token) in order of id, padding left out."""
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path, vocab_size=512)
    tokens = AutoTokenizer.from_pretrained(folder).get_vocab()
    digest = hashlib.sha256()
    for token, _ in sorted(tokens.items(), key=lambda entry: entry[1]):
        digest.update(len(token.encode()).to_bytes(4, "little") + token.encode())
    assert token_table_hash(folder) == digest.digest()


def test_padding_is_left_out_and_tokens_are_not(tmp_path: Path) -> None:
    """More rows of logits change nothing; another string for an id does."""
    small = make_tiny_model(tmp_path / "small", vocab_size=300)
    padded = make_tiny_model(tmp_path / "padded", vocab_size=512)
    assert token_table_hash(small) != token_table_hash(padded)
    save_tokenizer(padded, 300)
    assert ModelConfig.load(padded).vocab_size == 512
    assert token_table_hash(small) == token_table_hash(padded)
    assert num_tokens(padded) == 300
    path = padded / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["added_tokens"][0]["content"] = "<|other|>"
    path.write_text(json.dumps(raw))
    assert token_table_hash(small) != token_table_hash(padded)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"model": None},
        {"model": {}},
        {"model": {"vocab": 7}},
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": [[]]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": 7},
    ],
    ids=json.dumps,
)
def test_a_broken_vocabulary_is_refused_by_its_file(tmp_path: Path, broken: object) -> None:
    """Whatever is wrong with it: an error that names the file, not a traceback."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    for read in (token_table_hash, num_tokens):
        with pytest.raises(ModelError, match=r"tokenizer\.json holds no vocabulary"):
            read(tmp_path)


def test_weights_fingerprint_sees_weights_and_config(tmp_path: Path) -> None:
    """The same model made twice agrees; another seed or another config does not."""
    first = make_tiny_model(tmp_path / "1")
    assert weights_fingerprint(first) == weights_fingerprint(make_tiny_model(tmp_path / "2"))
    assert weights_fingerprint(first) != weights_fingerprint(
        make_tiny_model(tmp_path / "3", seed=1)
    )
    other = make_tiny_model(tmp_path / "4", rms_norm_eps=1e-4)
    assert weights_fingerprint(first) != weights_fingerprint(other)


def test_only_the_weights_that_are_loaded_count(tmp_path: Path) -> None:
    """The same weights in another layout beside them, as some publish them, change nothing."""
    folder = make_tiny_model(tmp_path)
    before = weights_fingerprint(folder)
    (folder / "consolidated.safetensors").write_bytes(b"the same in another layout")
    assert weights_fingerprint(folder) == before


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (None, r"neither model\.safetensors nor"),
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "lacks model-2"),
        ({"weight_map": {}}, "not a list of files"),
        ({"weight_map": 7}, "not a list of files"),
        ({"weight_map": {"a": "../model-1.safetensors"}}, "not a list of files"),
        ({"weight_map": {"a": 7}}, "not a list of files"),
    ],
    ids=json.dumps,
)
def test_missing_weights_are_named(tmp_path: Path, index: object, reason: str) -> None:
    """No file, an index that speaks of others than there are, an index that is none."""
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=reason):
        weight_files(tmp_path)


def test_policy_files_need_no_torch() -> None:
    """Scheduling, configs and fingerprints can be used where torch is not installed."""
    modules = ("batch", "block_pool", "config", "fingerprints", "numerics", "sequence")
    modules += ("memory", "prefix", "sparse_probs", "weight_files")
    code = ";".join(f"import outrider.engine.{name}" for name in modules)
    code += ";import sys;sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=15, check=False).returncode == 0
