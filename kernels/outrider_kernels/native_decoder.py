"""A step of a whole decoder as one call: csrc/decoder.h. What Python does for it is here.

Pointers into weights and caches are collected once; a step hands over its own numbers and gets
logits. Activations are float32 inside, in buffers that belong to the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from outrider_kernels.native_attention import NativePlan
from outrider_kernels.native_library import (
    AttentionShape,
    Cache,
    Decoder,
    DecoderLayer,
    Library,
    StepJob,
    Weight,
    native_cache,
)
from outrider_kernels.native_linear import StripWeight, native_weight


class Projection(Protocol):
    """A matrix, applied as x @ weight + bias."""

    @property
    def weight(self) -> StripWeight:
        """As `native_linear` packs it."""

    @property
    def bias(self) -> torch.Tensor | None:
        """float32 [out]."""


class Layer(Protocol):
    """The weights of a layer; norms are float32 [hidden]."""

    @property
    def attention_norm(self) -> torch.Tensor: ...
    @property
    def mlp_norm(self) -> torch.Tensor: ...
    @property
    def query_key_norm(self) -> torch.Tensor | None:
        """float32 [heads + kv_heads, head_dim]."""

    @property
    def qkv(self) -> Projection: ...
    @property
    def attention_out(self) -> Projection: ...
    @property
    def gate_up(self) -> Projection: ...
    @property
    def down(self) -> Projection: ...


class NativeCache:
    """Where a model's keys and values lie; the tensors must outlive it."""

    def __init__(self, layers: ctypes.Array[Cache], block_size: int) -> None:
        self.layers = layers
        self.block_size = block_size


class NativeDecoder:
    """A model's weights as the library takes them, and its step."""

    def __init__(
        self,
        library: Library,
        layers: Sequence[Layer],
        head: Projection,
        table: torch.Tensor | None,
        final_norm: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        *,
        num_heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        """table: of embeddings, [vocab, hidden], None where it is the head.

        cos, signed_sin: float32 [positions, 1, head_dim], as `elementwise.rotary` takes a row of
        them. ValueError for tensors that do not fit each other.
        """
        hidden, head_dim = head.weight.num_in, cos.shape[-1]
        self._library = library
        self._shape = AttentionShape(heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
        self._num_positions = cos.shape[0]
        self._kept: list[object] = []
        if head_dim % 2 or num_heads % kv_heads:
            raise ValueError(f"{num_heads} heads of {head_dim} do not fit {kv_heads} KV heads")
        rotated = (num_heads + kv_heads, head_dim)
        native_layers = (DecoderLayer * len(layers))()
        for native, layer in zip(native_layers, layers, strict=True):
            native.attention_norm = self._pointer(layer.attention_norm, (hidden,))
            native.mlp_norm = self._pointer(layer.mlp_norm, (hidden,))
            if layer.query_key_norm is not None:
                native.query_key_norm = self._pointer(layer.query_key_norm, rotated)
            width = num_heads * head_dim
            native.qkv = self._weight(layer.qkv, hidden, width + 2 * kv_heads * head_dim)
            native.attention_out = self._weight(layer.attention_out, width, hidden)
            inner = layer.down.weight.num_in
            native.gate_up = self._weight(layer.gate_up, hidden, 2 * inner)
            native.down = self._weight(layer.down, inner, hidden)
        vocab_size = head.weight.num_out
        table_at = None
        if table is None and head.weight.type == "int4":
            raise ValueError("a head in int4 cannot be the table of embeddings too")
        if table is not None:
            if table.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"a table must be float32 or bfloat16, not {table.dtype}")
            table_at = self._pointer(table, (vocab_size, hidden), table.dtype)
        self._native = Decoder(
            layers=ctypes.addressof(native_layers),
            table=table_at,
            final_norm=self._pointer(final_norm, (hidden,)),
            head=self._weight(head, hidden, vocab_size),
            cos=self._pointer(cos, (self._num_positions, 1, head_dim)),
            signed_sin=self._pointer(signed_sin, (self._num_positions, 1, head_dim)),
            shape=self._shape,
            num_layers=len(layers),
            hidden=hidden,
            table_is_bf16=table is not None and table.dtype == torch.bfloat16,
            eps=eps,
        )
        self._kept.append(native_layers)
        self._address = ctypes.addressof(self._native)

    def _pointer(
        self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> int:
        """Where its numbers lie, in one piece, as long as this lives."""
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _weight(self, projection: Projection, num_in: int, num_out: int) -> Weight:
        weight, bias = projection.weight, projection.bias
        if (weight.num_in, weight.num_out) != (num_in, num_out):
            raise ValueError(
                f"a weight [{weight.num_in}, {weight.num_out}] is not [{num_in}, {num_out}]"
            )
        bias = None if bias is None else bias.contiguous()
        self._kept += [weight, bias]
        return native_weight(weight, bias)

    def cache(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> NativeCache:
        """The cache's tensors, of each layer, for `step`. ValueError if they do not fit."""
        if not len(keys) == len(values) == self._native.num_layers:
            raise ValueError(f"a cache of {len(keys)} layers, not of {self._native.num_layers}")
        layers = (Cache * len(keys))()
        for i, (k_cache, v_cache) in enumerate(zip(keys, values, strict=True)):
            layers[i] = native_cache(k_cache, v_cache, self._shape)
        return NativeCache(layers, keys[0].shape[1])

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        logit_rows: torch.Tensor,
        plan: NativePlan,
        cache: NativeCache,
    ) -> torch.Tensor:
        """Write the tokens' keys and values and return logits, float32 [num_logits, vocab].

        All are int64 [num_rows], but logit_rows, [num_logits]: the rows whose logits are wanted.
        Numbers in them and in the plan must be in range. ValueError for another shape or dtype.
        """
        num_rows, num_logits = len(token_ids), len(logit_rows)
        for tensor in (token_ids, positions, slots, logit_rows):
            if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError("the numbers of a step must be int64, in one piece")
        if not num_rows == len(positions) == len(slots) == plan.num_tokens:
            raise ValueError(
                f"{num_rows} tokens, {len(positions)} positions, {len(slots)} slots and a plan for "
                f"{plan.num_tokens} do not fit"
            )
        if plan.block_size != cache.block_size:
            raise ValueError(f"blocks of {cache.block_size} do not fit a plan of {plan.block_size}")
        logits = torch.empty(num_logits, self._native.head.num_out)
        job = StepJob(
            decoder=self._address,
            caches=ctypes.addressof(cache.layers),
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            attention=plan.native,
            num_rows=num_rows,
            num_logits=num_logits,
            num_threads=torch.get_num_threads(),
        )
        self._library.step(self._library.kernels, ctypes.byref(job))
        return logits
