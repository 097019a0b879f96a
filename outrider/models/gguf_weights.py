"""Weights and configuration of a Llama-shaped GGUF as the usual Hugging Face files, in float32.

Needs numpy, gguf and safetensors. Knows nothing of tokenizers or of where the file came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import FetchFailed

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def field(reader: GGUFReader, key: str) -> Any:
    """One metadata value."""
    found = reader.get_field(key)
    if found is None:
        raise FetchFailed(f"the GGUF has no {key}")
    return found.contents()


def hf_name(gguf_name: str) -> str:
    """The name that the published checkpoints use for this tensor."""
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    block, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or kind not in LAYER_NAMES:
        raise FetchFailed(f"the GGUF has a tensor that no Llama has: {gguf_name}")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}"


def unpermute(weight: Array, num_heads: int) -> Array:
    """Undo GGUF's order of rotary pairs in a query or key matrix.

    GGUF puts the two numbers that one angle turns side by side (0, d/2, 1, d/2+1, ...); the
    published order has the first halves of all pairs first.
    """
    out_size, in_size = weight.shape
    pairs = weight.reshape(num_heads, out_size // num_heads // 2, 2, in_size)
    return pairs.swapaxes(1, 2).reshape(out_size, in_size)


def write_weights(reader: GGUFReader, folder: Path, on_tensor: Callable[[int, int], None]) -> None:
    """Dequantise every tensor into model.safetensors; `on_tensor` is told (done, all)."""
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    num_heads = {
        "attn_q.weight": int(field(reader, "llama.attention.head_count")),
        "attn_k.weight": int(field(reader, "llama.attention.head_count_kv")),
    }
    weights: dict[str, Array] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        heads = num_heads.get(tensor.name.split(".", 2)[-1])
        if heads is not None:
            value = unpermute(value, heads)
        weights[hf_name(tensor.name)] = np.ascontiguousarray(value)
        on_tensor(done, len(reader.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_configs(reader: GGUFReader, folder: Path, eos_token_ids: Sequence[int]) -> None:
    """config.json and generation_config.json, with the keys that published checkpoints use."""
    import numpy as np

    if (architecture := field(reader, "general.architecture")) != "llama":
        raise FetchFailed(f"only Llama-shaped models can be converted, this one is {architecture}")
    hidden_size = int(field(reader, "llama.embedding_length"))
    num_heads = int(field(reader, "llama.attention.head_count"))
    eps = np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon"))
    eos = eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids)
    special_ids = {
        "bos_token_id": int(field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "pad_token_id": int(field(reader, "tokenizer.ggml.padding_token_id")),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **special_ids,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(field(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(field(reader, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(field(reader, "llama.block_count")),
        "num_key_value_heads": int(field(reader, "llama.attention.head_count_kv")),
        "rms_norm_eps": float(str(eps)),  # 1e-05, not its float32 neighbour in 17 digits
        "rope_scaling": None,
        "rope_theta": float(field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": int(field(reader, "llama.vocab_size")),
    }
    for name, content in (("config.json", config), ("generation_config.json", special_ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
