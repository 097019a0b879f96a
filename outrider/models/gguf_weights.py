"""Weights of a GGUF as the usual Hugging Face files, in float32.

Needs numpy, gguf and safetensors. Knows nothing of tokenizers or of where the file came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import FetchFailed

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

MAX_SHARD_BYTES = 2_000_000_000
"""A larger model is written as several files, so that only one of them is held in memory."""
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's stretched frequencies, which the published form has in config.json."""
TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def field(reader: GGUFReader, key: str) -> Any:
    """One metadata value."""
    found = reader.get_field(key)
    if found is None:
        raise FetchFailed(f"the GGUF has no {key}")
    return found.contents()


def optional_field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """One metadata value, or the default where the file says nothing."""
    found = reader.get_field(key)
    return default if found is None else found.contents()


def hf_name(gguf_name: str) -> str:
    """The name that the published checkpoints use for this tensor."""
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    block, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    kind, _, suffix = kind.partition(".")
    if block != "blk" or kind not in LAYER_NAMES or suffix not in ("weight", "bias"):
        raise FetchFailed(f"the GGUF has a tensor that no Llama has: {gguf_name}")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def unpermute(tensor: Array, num_heads: int) -> Array:
    """Undo GGUF's order of rotary pairs in a query or key matrix, or in its bias.

    GGUF puts the two numbers that one angle turns side by side (0, d/2, 1, d/2+1, ...); the
    published order has the first halves of all pairs first.
    """
    out_size = tensor.shape[0]
    pairs = tensor.reshape(num_heads, out_size // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def check_tensors(reader: GGUFReader) -> None:
    """FetchFailed for a tensor with an unknown name or in a format that cannot be decoded."""
    from gguf.quants import dequantize

    for tensor in _weight_tensors(reader):
        hf_name(tensor.name)
        try:
            dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError:
            raise FetchFailed(
                f"{tensor.name} is quantised as {tensor.tensor_type.name}, which is not supported; "
                "take a file in Q4_0, Q4_1, Q8_0, a K format, BF16, F16 or F32"
            ) from None


def write_weights(reader: GGUFReader, folder: Path, on_tensor: Callable[[int, int], None]) -> None:
    """Dequantise every tensor into safetensors; `on_tensor` is told (done, all)."""
    from safetensors.numpy import save_file

    heads = _permuted_heads(reader)
    shards = _plan_shards(_weight_tensors(reader))
    num_tensors = sum(len(shard) for shard in shards)
    weight_map: dict[str, str] = {}
    done = 0
    for index, shard in enumerate(shards, start=1):
        weights: dict[str, Array] = {}
        for tensor in shard:
            weights[hf_name(tensor.name)] = _decode(tensor, heads)
            done += 1
            on_tensor(done, num_tensors)
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, name)
    if len(shards) > 1:
        content = json.dumps({"weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(content + "\n")


def _weight_tensors(reader: GGUFReader) -> list[ReaderTensor]:
    return [tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS]


def _permuted_heads(reader: GGUFReader) -> dict[str, int]:
    """Heads of the tensors whose rotary pairs lie side by side: Llama's alone."""
    if field(reader, "general.architecture") != "llama":
        return {}
    num_heads = int(field(reader, "llama.attention.head_count"))
    kv_heads = int(optional_field(reader, "llama.attention.head_count_kv", num_heads))
    return {"attn_q": num_heads, "attn_k": kv_heads}


def _plan_shards(tensors: list[ReaderTensor]) -> list[list[ReaderTensor]]:
    """The tensors in order, cut so that no file exceeds the limit by more than its first tensor."""
    shards: list[list[ReaderTensor]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = 4 * int(tensor.n_elements)
        if shards[-1] and size + num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


def _decode(tensor: ReaderTensor, permuted_heads: dict[str, int]) -> Array:
    """The tensor in float32 and in the published order."""
    import numpy as np
    from gguf.quants import dequantize

    value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    parts = tensor.name.split(".")
    heads = permuted_heads.get(parts[2]) if parts[0] == "blk" else None
    return np.ascontiguousarray(value if heads is None else unpermute(value, heads))
