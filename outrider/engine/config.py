"""A model folder's config.json, read without torch: the shape of the decoder and what is refused.

Whatever would change the result and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.model_error import ModelError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
FORMATS = "float32, float16 and bfloat16 safetensors, and GGUF files"
"""What a refused checkpoint could be replaced by."""
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretched rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int
    """Tokens of context before stretching."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-shaped decoder."""

    architecture: str
    vocab_size: int
    """Rows of the logits; may be padded beyond the tokenizer's ids."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """Tokens of context, prompt and output together."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    query_key_norms: bool
    """Each head's query and key is normalised before it is rotated."""
    tied_head: bool
    """The output projection is the embedding table."""
    eos_token_ids: tuple[int, ...]
    """Sorted; from generation_config.json if it names any, else from config.json."""
    num_tokens: int | None = None
    """Ids from here on stand for no token and are never chosen; None: every id is a token."""

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read and check config.json; ModelError for what is missing, broken or not supported."""
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        try:
            return _parse(raw, read_json(generation) if generation.exists() else {})
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'}: {error} is missing") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:  # a ModelError too
            raise ModelError(f"{folder / 'config.json'}: {error}") from error


def read_json(path: Path) -> Json:
    """The file's JSON object; ModelError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _parse(raw: Json, generation: Json) -> ModelConfig:
    """The config of a supported model, with the defaults that its architecture has."""
    architecture = _check_supported(raw)
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    query_key_norms = architecture == "Qwen3ForCausalLM"
    default_head_dim = 128 if query_key_norms else hidden_size // num_heads
    head_dim = int(raw.get("head_dim") or default_head_dim)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} heads do not divide among {num_kv_heads} key/value heads")
    if head_dim % 2:
        raise ModelError(f"heads of {head_dim} values cannot be rotated: the number is odd")
    rope_theta, rope_scaling = _parse_rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        query_key_norms=query_key_norms,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(generation.get("eos_token_id"))
        or _token_ids(raw.get("eos_token_id")),
    )


def _check_supported(raw: Json) -> str:
    """The architecture's name; ModelError for anything that would be computed wrongly."""
    names = raw.get("architectures") or [f"model_type {raw.get('model_type')!r}"]
    architecture = str(names[0])
    if any(raw.get(key) for key in _EXPERT_KEYS):
        raise ModelError(f"{architecture} is a mixture of experts, which is not supported")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if quantization := raw.get("quantization_config"):
        method = str(quantization.get("quant_method", "unknown")).upper()
        raise ModelError(f"{method} checkpoints are not supported, only {FORMATS}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {activation} is not supported, only silu")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported")
    if "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelError("sliding-window layers are not supported")
    # Qwen writes a window's size even where it is switched off. Mistral has no switch, and a
    # window of 4096 unless its file says otherwise.
    is_mistral = architecture == "MistralForCausalLM"
    window = raw.get("sliding_window", 4096 if is_mistral else None)
    switched_on = raw.get("use_sliding_window", is_mistral)
    if window is not None and switched_on and window < int(raw["max_position_embeddings"]):
        raise ModelError(f"a sliding window of {window} tokens is not supported")
    return architecture


def _parse_rope(raw: Json) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from the old or the new form of the file."""
    scaling: Json = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"rope type {kind} is not supported, only default and llama3")
    return theta, RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_len=int(scaling["original_max_position_embeddings"]),
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of them or nothing, as sorted ids."""
    if value is None:
        return ()
    return tuple(sorted({int(i) for i in (value if isinstance(value, list) else [value])}))
