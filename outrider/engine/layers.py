"""A decoder layer's tensors, taken out of a checkpoint by their published names.

Knows which matrices are joined and how they are laid out, not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.engine.config import ModelConfig
from outrider.model_error import ModelError
from outrider_kernels.ops import Weight


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix, applied as x @ weight + bias."""

    weight: Weight  # of the operations that apply it
    bias: torch.Tensor | None = None  # float32 [out]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Projections that read the same input are one matrix."""

    attention_norm: torch.Tensor  # float32 [hidden], like all norms
    qkv: Projection  # queries, then keys, then values
    query_key_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim]: each query head's weights, then each key head's"""
    attention_out: Projection
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Projection  # gate, then up
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All of them."""
        return self.qkv, self.attention_out, self.gate_up, self.down


class TensorReader:
    """Takes named tensors out of a checkpoint and checks that all fit and none is left."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], pack: Callable[[torch.Tensor], Weight]
    ) -> None:
        """pack: as `Ops.pack`."""
        self._tensors = tensors
        self._pack = pack

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor; ModelError unless it is there and has this shape."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name}")
        if tensor.shape != shape:
            raise ModelError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor.contiguous()

    def projection(self, prefix: str, num_outs: Mapping[str, int], num_in: int) -> Projection:
        """The named matrices one below the other, with biases where the checkpoint has them."""
        weights, biases, has_bias = [], [], False
        for name, num_out in num_outs.items():
            weights.append(self.take(f"{prefix}.{name}.weight", num_out, num_in))
            bias = f"{prefix}.{name}.bias"
            if bias in self._tensors:
                has_bias = True
                biases.append(self.take(bias, num_out))
            else:
                biases.append(torch.zeros(num_out, device=weights[-1].device))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Projection(self._pack(weight), torch.cat(biases) if has_bias else None)

    def require_empty(self) -> None:
        """Raise ModelError if a tensor was not used: the model would be computed wrongly."""
        left = [name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelError(
                f"tensors of the checkpoint that this decoder does not use: {left[:5]}"
            )


def read_layer(reader: TensorReader, config: ModelConfig, index: int) -> Layer:
    """One layer's tensors by their names in the checkpoint."""
    prefix = f"model.layers.{index}"
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.projection(
            f"{prefix}.self_attn", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden
        ),
        query_key_norm=_read_query_key_norm(reader, config, prefix),
        attention_out=reader.projection(f"{prefix}.self_attn", {"o_proj": hidden}, q_size),
        mlp_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.projection(f"{prefix}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden),
        down=reader.projection(f"{prefix}.mlp", {"down_proj": hidden}, inner),
    )


def _read_query_key_norm(
    reader: TensorReader, config: ModelConfig, prefix: str
) -> torch.Tensor | None:
    """One row of weights a head, so that queries and keys are normalised in one go."""
    if not config.query_key_norms:
        return None
    query = reader.take(f"{prefix}.self_attn.q_norm.weight", config.head_dim)
    key = reader.take(f"{prefix}.self_attn.k_norm.weight", config.head_dim)
    return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
