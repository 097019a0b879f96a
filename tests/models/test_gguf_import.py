"""GGUF files as models: the same logits and ids as transformers gives, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.config import ModelConfig
from outrider.engine.fingerprints import token_table_hash
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.models import gguf_weights
from outrider.models.errors import FetchFailed
from outrider.models.gguf_config import LLAMA3_SCALINGS, llama3_factors
from outrider.models.gguf_tokenizer import merges_of
from outrider.models.resolve import display_name, resolve
from tests.support.tiny_gguf import add_scored_tokenizer, write_gguf
from tests.support.tiny_models import make_tiny_model

TEXTS = (
    "The quick brown fox, twice: 12 34567!",
    "<|im_start|>user\nwörld 🙂<|im_end|>\n",
    "  a\n\n b",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def our_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The engine's logits of every position."""
    runner = Runner(LlamaModel.load(folder), 8)
    return runner.forward(Batch([BatchItem(token_ids, 0, list(range(8)), len(token_ids))]))


def assert_as_transformers(gguf: Path) -> None:
    """Logits within 1e-4 of the largest |logit| of what transformers makes of the same file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    token_ids = list(range(3, 103))
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    error = (our_logits(resolve(str(gguf)), token_ids) - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_format_gives_transformers_logits(tmp_path: Path, quantization: str) -> None:
    """A Llama, whose queries and keys lie permuted, in each format."""
    folder = make_tiny_model(tmp_path / "source")
    assert_as_transformers(write_gguf(folder, tmp_path / "m.gguf", quantization=quantization))


@pytest.mark.parametrize(
    "shape",
    [
        {"arch": "qwen2", "tied_head": False},
        {"arch": "qwen3", "head_dim": 128},
        {"arch": "mistral", "sliding_window": None},
    ],
    ids=lambda shape: shape["arch"],
)
def test_every_architecture_gives_transformers_logits(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    """Biases, norms of heads, heads of their own width, untied heads."""
    folder = make_tiny_model(tmp_path / "source", **shape)
    assert_as_transformers(write_gguf(folder, tmp_path / "m.gguf", quantization="Q8_0"))


@pytest.mark.parametrize(
    "shape",
    [{"attention_bias": True, "tied_head": False}, {"arch": "qwen3", "head_dim": 32}],
    ids=["llama-biased", "qwen3"],
)
def test_a_float_file_is_the_model_it_was_made_from(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Logits bit for bit, in several files too; config, eos and ids as in the source."""
    folder = make_tiny_model(tmp_path / "source", **shape)
    token_ids = list(range(3, 103))
    expected = our_logits(folder, token_ids)
    gguf = write_gguf(folder, tmp_path / "whole.gguf")
    imported = resolve(str(gguf))
    assert torch.equal(our_logits(imported, token_ids), expected)
    assert ModelConfig.load(imported) == ModelConfig.load(folder)
    assert token_table_hash(imported) == token_table_hash(folder)
    assert display_name(str(gguf)) == "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_weights, "MAX_SHARD_BYTES", 100_000)
        sharded = resolve(str(write_gguf(folder, tmp_path / "other.gguf", extra={"x.y": 1})))
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert torch.equal(our_logits(sharded, token_ids), expected)


def test_a_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    """A copy under another name is the same folder; nothing else is left in the cache."""
    folder = make_tiny_model(tmp_path / "source")
    first = write_gguf(folder, tmp_path / "first.gguf")
    imported = resolve(str(first))
    made = (imported / "model.safetensors").stat().st_mtime_ns
    second = tmp_path / "second.gguf"
    second.write_bytes(first.read_bytes())
    assert resolve(str(second)) == imported
    assert (imported / "model.safetensors").stat().st_mtime_ns == made
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == [imported]


@pytest.mark.parametrize("rule", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
def test_ids_are_those_of_the_rule(tmp_path: Path, rule: str) -> None:
    """Texts become the ids that the published rule for words gives, and come back."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    folder = make_tiny_model(tmp_path / "source")
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
    if rule in digits:
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits[rule]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )  # fmt: skip
        source.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    imported = resolve(str(write_gguf(folder, tmp_path / "m.gguf", rule=rule)))
    ours = Tokenizer.from_file(str(imported / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        expected = source.encode(text).ids
        # Llama 3's texts begin with a token of their own.
        assert ids == ([1, *expected] if rule == "llama-bpe" else expected)
        assert ours.decode(source.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((imported / "tokenizer_config.json").read_text())
    assert "im_start" in config["chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_scored_vocabulary_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    """Llama 2's kind of tokenizer: pieces with scores, bytes for what no piece spells."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path / "source", vocab_size=400)
    gguf = write_gguf(folder, tmp_path / "m.gguf", add_tokenizer=add_scored_tokenizer)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = Tokenizer.from_file(str(resolve(str(gguf)) / "tokenizer.json"))
    for text in ("The river runs to the sea", "a door  behind", "wörld 🙂\n"):
        ids = ours.encode(text).ids
        assert ids == reference(text).input_ids
        assert ids[0] == 1
    # llama.cpp and Llama 2's own file put a space after a special token too; transformers does not.
    assert ours.encode("the</s>hill").tokens == ["<s>", "▁the", "</s>", "▁hill"]
    assert ours.decode(ours.encode("the red wörld 🙂").ids) == "the red wörld 🙂"


def test_scores_stand_for_merges() -> None:
    """Every way to join two tokens into a third, the third with the best score first."""
    vocab = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4}
    merges = merges_of(vocab, [0.0, 0.0, -2.0, -3.0, -1.0])
    assert merges == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


def test_llama3_frequencies_are_recognised(tmp_path: Path) -> None:
    """The factors of a published scaling become its parameters; other factors are refused."""
    scaling = {**LLAMA3_SCALINGS[1], "rope_theta": 500000.0}
    folder = make_tiny_model(tmp_path / "source", rope_parameters=scaling, head_dim=64)
    factors = np.array(llama3_factors(scaling, 500000.0, 64), dtype=np.float32)
    assert factors.min() == 1
    assert factors.max() == pytest.approx(32)
    gguf = write_gguf(folder, tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    token_ids = list(range(3, 103))
    imported = resolve(str(gguf))
    assert torch.equal(our_logits(imported, token_ids), our_logits(folder, token_ids))
    write_gguf(folder, gguf, extra_tensors={"rope_freqs.weight": factors * 2})
    with pytest.raises(FetchFailed, match="unknown way"):
        resolve(str(gguf))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64"),
        ({"llama.rope.dimension_count": 8}, "8 of the 16 values of a head"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, cache: Path, extra: dict[str, int], reason: str
) -> None:
    """The error names file and reason, and nothing is left in the cache."""
    gguf = write_gguf(make_tiny_model(tmp_path / "source"), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(FetchFailed, match=rf"m\.gguf: .*{reason}"):
        resolve(str(gguf))
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_other_formats_and_files_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown tokenizers, formats that nothing decodes, half files and other files."""
    from gguf import GGMLQuantizationType, quants

    folder = make_tiny_model(tmp_path / "source")
    gguf = write_gguf(folder, tmp_path / "m.gguf", rule="tekken")
    with pytest.raises(FetchFailed, match="tekken"):
        resolve(str(gguf))
    write_gguf(folder, gguf, quantization="Q4_0")
    monkeypatch.delitem(quants._type_traits, GGMLQuantizationType.Q4_0)
    with pytest.raises(FetchFailed, match="quantised as Q4_0"):
        resolve(str(gguf))
    gguf.write_bytes(gguf.read_bytes()[:20_000])
    with pytest.raises(FetchFailed, match="not a whole GGUF"):
        resolve(str(gguf))
    gguf.write_bytes(b"not a GGUF at all")
    with pytest.raises(FetchFailed, match="not a whole GGUF"):
        resolve(str(gguf))
