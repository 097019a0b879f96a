"""Models for a GPU's check: the real small one where it is at hand, and random ones of a size."""

from __future__ import annotations

import torch

from outrider.engine.config import ModelConfig
from outrider.engine.device import parse_dtype, rounding_of
from outrider.engine.model import LlamaModel
from outrider.models.errors import NotFetched
from outrider.models.resolve import resolve

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    query_key_norms=False,
    tied_head=True,
    eos_token_ids=(2,),
)
CONFIG_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    query_key_norms=False,
    tied_head=False,
    eos_token_ids=(2,),
)


def small_model(
    dtype: str, device: str, kernels: str, kv_dtype: str = "auto"
) -> tuple[LlamaModel, bool]:
    """SmolLM2, and whether its weights are the real ones; no others are looked for."""
    try:
        folder = resolve(SMOLLM2)
        return LlamaModel.load(folder, dtype, device, kernels, kv_dtype), True
    except (NotFetched, ImportError) as reason:
        print(f"random weights in place of {SMOLLM2}: {reason}", flush=True)
    return random_model(SMOLLM2_CONFIG, dtype, torch.device(device), kernels, kv_dtype), False


def random_model(
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    kernels: str,
    kv_dtype: str = "auto",
) -> LlamaModel:
    """A model of a size, with weights whose sums stay as large as their inputs.

    dtype: as in settings, but for "auto".
    """
    generator = torch.Generator(device).manual_seed(0)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        made = torch.empty(num_out, num_in, dtype=parse_dtype(dtype), device=device)
        return made.normal_(0.0, num_in**-0.5, generator=generator)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, device=device),
    }
    if not config.tied_head:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
    sizes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, device=device)
        for name, (num_out, num_in) in sizes.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(num_out, num_in)
    return LlamaModel(
        config,
        tensors,
        weights_fingerprint="random",
        kernels=kernels,
        rounding=rounding_of(dtype),
        kv_dtype=kv_dtype,
    )
