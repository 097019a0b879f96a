"""The configuration inside a GGUF as config.json and generation_config.json.

What the published form could not express, or what no decoder here computes, is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import FetchFailed
from outrider.models.gguf_weights import ROPE_FACTORS, field, optional_field

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The parameters that published Llama 3 models have. A GGUF holds only the factors that follow from
# them, one a frequency.
LLAMA3_SCALINGS = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


def eos_token_ids(reader: GGUFReader) -> tuple[int, ...]:
    """Ids that end an answer: the end of a text and, where the file has one, the end of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [optional_field(reader, key) for key in keys]
    return tuple(dict.fromkeys(int(each) for each in found if each is not None))


def write_configs(reader: GGUFReader, folder: Path, eos_token_ids: Sequence[int]) -> None:
    """config.json and generation_config.json, with the keys that published checkpoints use."""
    import numpy as np

    architecture = _check_supported(reader)

    def shape(key: str, default: Any = None) -> Any:
        if default is None:
            return field(reader, f"{architecture}.{key}")
        return optional_field(reader, f"{architecture}.{key}", default)

    hidden_size = int(shape("embedding_length"))
    num_heads = int(shape("attention.head_count"))
    head_dim = int(shape("attention.key_length", hidden_size // num_heads))
    if (num_rotated := int(shape("rope.dimension_count", head_dim))) != head_dim:
        raise FetchFailed(
            f"rotating {num_rotated} of the {head_dim} values of a head is not supported"
        )
    rope_theta = float(shape("rope.freq_base", 10000.0))
    names = {tensor.name for tensor in reader.tensors}
    special_ids = _special_ids(reader, eos_token_ids)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "attention_bias": "blk.0.attn_q.bias" in names,
        "attention_dropout": 0.0,
        **special_ids,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(shape("feed_forward_length")),
        "max_position_embeddings": int(shape("context_length")),
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "model_type": architecture,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(shape("block_count")),
        "num_key_value_heads": int(shape("attention.head_count_kv", num_heads)),
        # 1e-05, not its float32 neighbour in 17 digits
        "rms_norm_eps": float(str(np.float32(shape("attention.layer_norm_rms_epsilon")))),
        "rope_scaling": _rope_scaling(reader, rope_theta, head_dim),
        "rope_theta": rope_theta,
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": _vocab_size(reader),
    }
    for name, content in (("config.json", config), ("generation_config.json", special_ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _check_supported(reader: GGUFReader) -> str:
    """The architecture's GGUF name; FetchFailed for what would be computed wrongly."""
    architecture = str(field(reader, "general.architecture"))
    if architecture not in ARCHITECTURES:
        raise FetchFailed(
            f"GGUF architecture {architecture} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if optional_field(reader, f"{architecture}.expert_count", 0):
        raise FetchFailed("the GGUF is a mixture of experts, which is not supported")
    scaling = optional_field(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise FetchFailed(f"rope scaling {scaling} is not supported in a GGUF, only Llama 3's")
    window = optional_field(reader, f"{architecture}.attention.sliding_window")
    if window and window < int(field(reader, f"{architecture}.context_length")):
        raise FetchFailed(f"a sliding window of {window} tokens is not supported")
    return architecture


def _special_ids(reader: GGUFReader, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if (bos := optional_field(reader, "tokenizer.ggml.bos_token_id")) is not None:
        ids["bos_token_id"] = int(bos)
    ids["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids)
    if (pad := optional_field(reader, "tokenizer.ggml.padding_token_id")) is not None:
        ids["pad_token_id"] = int(pad)
    return ids


def _vocab_size(reader: GGUFReader) -> int:
    """Rows of the embedding table, padding included; the metadata does not always say it."""
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[-1])  # GGUF counts dimensions from the innermost
    raise FetchFailed("the GGUF has no tensor token_embd.weight")


def _rope_scaling(reader: GGUFReader, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The Llama 3 parameters whose factors are those of the file; None if it has no factors."""
    import numpy as np

    found = [tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS]
    if not found:
        return None
    factors = np.asarray(found[0].data, dtype=np.float32).reshape(-1)
    for scaling in LLAMA3_SCALINGS:
        expected = llama3_factors(scaling, theta, head_dim)
        if factors.size == len(expected) and np.allclose(factors, expected, rtol=1e-4):
            return dict(scaling)
    raise FetchFailed(f"the GGUF stretches rotary frequencies in an unknown way ({ROPE_FACTORS})")


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """What each rotary frequency is divided by; written with the names of config.json."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        turns = length / (2 * math.pi * theta ** (i / head_dim))  # in the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
