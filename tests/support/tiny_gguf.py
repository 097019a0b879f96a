"""Writes a model folder as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file

from outrider.models.gguf_weights import LAYER_NAMES, TOP_LEVEL_NAMES


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quantization: str = "F32",
    rule: str = "gpt-2",
    add_tokenizer: Callable[[GGUFWriter, int], None] | None = None,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """The folder's model with its matrices in one format; `extra` are integers by metadata key."""
    config = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, architecture)
    rope = config.get("rope_parameters") or {"rope_theta": 10000.0}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    if add_tokenizer is None:
        add_byte_level_tokenizer(writer, folder, rule)
    else:
        add_tokenizer(writer, config["vocab_size"])
    add_tensors(writer, folder, config, architecture, GGMLQuantizationType[quantization])
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Everything that was added, to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level_tokenizer(writer: GGUFWriter, folder: Path, rule: str) -> None:
    """tokenizer.json's vocabulary, merges and special tokens, and the chat template."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    by_id = {token_id: token for token, token_id in raw["model"]["vocab"].items()}
    special = {each["id"] for each in raw["added_tokens"]}
    by_id |= {each["id"]: each["content"] for each in raw["added_tokens"]}
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [
        TokenType.CONTROL if i in special
        else TokenType.NORMAL if i in by_id
        else TokenType.UNUSED
        for i in range(vocab_size)
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def add_scored_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Llama 2's kind: three special tokens, 256 bytes, then pieces, the likely ones first."""
    words = ["▁the", "▁river", "▁runs", "▁to", "▁sea", "▁a", "▁hill", "▁red", "▁door", "▁behind"]
    parts = sorted({w[:n] for w in words for n in range(2, len(w) + 1)}, key=lambda p: (len(p), p))
    characters = sorted({c for w in words for c in w} | set("wörldT"))
    pieces = ["th", "he", "er", *parts, *characters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * len(pieces)
    padding = vocab_size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(types + [TokenType.UNUSED] * padding)
    writer.add_token_scores(
        [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1e4] * padding
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def add_tensors(
    writer: GGUFWriter,
    folder: Path,
    config: dict[str, Any],
    architecture: str,
    quantization: GGMLQuantizationType,
) -> None:
    """Every tensor under its GGUF name; matrices quantised, vectors in float32."""
    top_level = {hf: gguf for gguf, hf in TOP_LEVEL_NAMES.items()}
    in_layer = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in top_level:
            gguf_name = top_level[name]
        else:
            _, _, layer, *middle, suffix = name.split(".")
            kind = in_layer[".".join(middle)]
            gguf_name = f"blk.{layer}.{kind}.{suffix}"
            if architecture == "llama" and kind in heads:
                tensor = _permute(tensor, heads[kind])
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name, tensor.astype(np.float32))
            continue
        data = quantize(np.ascontiguousarray(tensor, dtype=np.float32), quantization)
        writer.add_tensor(gguf_name, data, raw_dtype=quantization)


def _permute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """The two numbers that one angle turns, side by side."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
