"""The decoder: Llama's shape, which SmolLM2, Mistral and Qwen share, in one forward.

It sees flat rows of tokens and never asks which sequence or phase they belong to; attention alone
knows about paging, through the plan that comes with each step.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from outrider.engine.config import ModelConfig
from outrider.engine.device import parse_device, parse_dtype, parse_kv_dtype, rounding_of
from outrider.engine.fingerprints import num_tokens, weights_fingerprint
from outrider.engine.kv_cache import KVCache
from outrider.engine.layers import Layer, Projection, TensorReader, read_layer
from outrider.engine.memory import block_bytes
from outrider.engine.numerics import choose_row_plan
from outrider.engine.precision import AUTO, EITHER, choose_precision, kept_precision
from outrider.engine.weights import load_weights
from outrider.model_error import ModelError
from outrider_kernels.model_shape import ModelShape
from outrider_kernels.native_attention import NativePlan
from outrider_kernels.native_decoder import NativeCache, NativeDecoder
from outrider_kernels.ops import Ops, Plan, Weight, select_ops


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step in tensors; rows after the tokens are padding."""

    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows], absolute
    slots: torch.Tensor  # int64 [num_tokens], where the cache takes each token
    logit_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
    attention: Plan


class LlamaModel:
    """Weights and how to apply them."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, torch.Tensor],
        *,
        weights_fingerprint: str,
        kernels: str = "auto",
        rounding: str | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        """Take the checkpoint's tensors; empties `tensors`, so that none is held twice.

        kernels, rounding: as for `select_ops`. kv_dtype: "auto", "int8" or "e4m3".
        """
        self.config = config
        self.weights_fingerprint = weights_fingerprint
        table = tensors.get("model.embed_tokens.weight")
        self.device = torch.device("cpu") if table is None else table.device
        self.dtype = torch.float32 if table is None else table.dtype
        """Of activations, and of weights unless they are rounded; sums, norms, softmax and logits
        are float32."""
        self._kv_dtype = parse_kv_dtype(kv_dtype, self.dtype)
        self.kv_dtype = str(self.dtype).removeprefix("torch.") if kv_dtype == AUTO else kv_dtype
        """Of keys and values in the cache."""
        ops = self._select_ops(kernels, rounding)
        reader = TensorReader(tensors, ops.pack)
        embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [read_layer(reader, config, i) for i in range(config.num_layers)]
        self.precision = rounding or str(self.dtype).removeprefix("torch.")
        """The dtype by its name in settings, never "auto"; EITHER where matrices differ in it."""
        if rounding == EITHER:
            self.precision = kept_precision([each.weight.type for each in self._projections()])
        self._final_norm = reader.take("model.norm.weight", config.hidden_size)
        if config.tied_head:
            tensors.pop("lm_head.weight", None)  # some checkpoints store the table twice
            head = embedding
        else:
            head = reader.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = Projection(ops.pack_table(head))
        self._embedding = None if config.tied_head else embedding
        """None: it is the head, one copy of both."""
        reader.require_empty()
        cos, signed_sin = _rotary_tables(config)
        self._cos, self._signed_sin = cos.to(self.device), signed_sin.to(self.device)
        self.row_invariant = True
        if ops.row_plan is not None:
            row_plan, self.row_invariant = choose_row_plan(self._probe_weights())
            ops = ops.with_row_plan(row_plan)
        self.ops: Ops = ops
        self._decoder: NativeDecoder | None = None
        self._caches: WeakKeyDictionary[KVCache, NativeCache] = WeakKeyDictionary()
        if ops.decoder is not None:
            self._decoder = ops.decoder(
                self._layers,
                self._head,
                self._embedding,
                self._final_norm,
                self._cos,
                self._signed_sin,
                num_heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                eps=config.rms_norm_eps,
            )

    @staticmethod
    def load(
        folder: Path | str,
        dtype: str = "float32",
        device: str = "cpu",
        kernels: str = "auto",
        kv_dtype: str = "auto",
    ) -> LlamaModel:
        """Read a model folder; ModelError says what is missing or not supported.

        dtype: "auto" (see `choose_precision`), "float32", "bfloat16", "int8" or "int4".
        """
        folder = Path(folder)
        dtype = choose_precision(dtype, device)
        place = parse_device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)  # where kernels of this thread start
        config = replace(ModelConfig.load(folder), num_tokens=num_tokens(folder))
        with ThreadPoolExecutor(1, "fingerprint") as beside:
            hashing = beside.submit(weights_fingerprint, folder)
            model = LlamaModel(
                config,
                load_weights(folder, parse_dtype(dtype), place),
                weights_fingerprint="",
                kernels=kernels,
                rounding=rounding_of(dtype),
                kv_dtype=kv_dtype,
            )
            model.weights_fingerprint = hashing.result()
        return model

    def _select_ops(self, kernels: str, rounding: str | None) -> Ops:
        config = self.config
        shape = ModelShape(
            self.dtype,
            self._kv_dtype,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
        )
        try:
            return select_ops(self.device, kernels, rounding=rounding, shape=shape)
        except ValueError as error:
            raise ModelError(str(error)) from None

    def set_spin(self, microseconds: int) -> None:
        """How long a thread that waits for others in a step keeps its core busy; 0: never.

        For all models of the process. Plain torch has threads of its own, which never do.
        """
        if self.ops.set_spin is not None:
            self.ops.set_spin(microseconds)

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of the model's shape."""
        return KVCache(
            self.config,
            num_blocks,
            block_size,
            self._kv_dtype,
            self.device,
            scales_apart=self.ops.scales_apart,
        )

    def block_bytes(self, block_size: int) -> int:
        """Memory of a block of such a cache, before there is one."""
        return block_bytes(self.config, block_size, self.kv_dtype, self.ops.scales_apart)

    def forward(self, step: StepInput, cache: KVCache) -> torch.Tensor:
        """Write the tokens' keys and values and return logits, float32 [num_logits, vocab]."""
        if self._decoder is None:
            return self._forward(step, cache)
        assert isinstance(step.attention, NativePlan)  # of the same operations
        native = self._caches.get(cache)
        if native is None:
            native = self._caches[cache] = self._decoder.cache(cache.keys, cache.values)
        return self._decoder.step(
            step.token_ids, step.positions, step.slots, step.logit_rows, step.attention, native
        )

    def _forward(self, step: StepInput, cache: KVCache) -> torch.Tensor:
        """The same, one operation after the other."""
        ops, eps = self.ops, self.config.rms_norm_eps
        if self._embedding is None:
            hidden = ops.lookup(self._head.weight, step.token_ids)  # [num_rows, hidden]
        else:
            hidden = self._embedding.index_select(0, step.token_ids)
        cos = self._cos.index_select(0, step.positions)  # [num_rows, 1, head_dim]
        signed_sin = self._signed_sin.index_select(0, step.positions)
        normed = ops.rms_norm(hidden, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attend(normed, layer, cos, signed_sin, step, cache, index)
            normed = ops.add_rms_norm(attended, hidden, layer.mlp_norm, eps)
            gate_up = ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            down = ops.linear(ops.silu_mul(gate_up), layer.down.weight, layer.down.bias)
            if index + 1 < len(self._layers):
                normed = ops.add_rms_norm(down, hidden, self._layers[index + 1].attention_norm, eps)
            else:  # the last norm is of wanted rows alone
                hidden.add_(down)
        wanted = hidden.index_select(0, step.logit_rows).float()
        normed = ops.rms_norm(wanted, self._final_norm, eps)
        return ops.linear(normed, self._head.weight, self._head.bias)

    def _attend(
        self,
        normed: torch.Tensor,  # [num_rows, hidden]
        layer: Layer,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        step: StepInput,
        cache: KVCache,
        index: int,
    ) -> torch.Tensor:
        """One layer's attention block, [num_rows, hidden]."""
        config, ops = self.config, self.ops
        num_rows = normed.shape[0]
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
        qkv = qkv.view(num_rows, -1, config.head_dim)
        queries_keys = qkv[:, :num_rotated]
        if layer.query_key_norm is not None:
            queries_keys = ops.rms_norm(queries_keys, layer.query_key_norm, config.rms_norm_eps)
        values = qkv[:, num_rotated:]
        k_cache, v_cache, scales = cache.keys[index], cache.values[index], cache.scales[index]
        q = ops.rotate_and_write(
            queries_keys, values, cos, signed_sin, k_cache, v_cache, step.slots, *scales
        )
        out = ops.paged_attention(q, k_cache, v_cache, step.attention, *scales)
        projection = layer.attention_out
        return ops.linear(out.view(num_rows, -1), projection.weight, projection.bias)

    @property
    def weight_bytes(self) -> int:
        """Of all matrices as they are held; a step reads them all, whatever its rows."""
        projections = [self._head, *self._projections()]
        return sum(projection.weight.nbytes for projection in projections)

    def _projections(self) -> list[Projection]:
        """Of all layers."""
        return [projection for layer in self._layers for projection in layer.projections]

    def _probe_weights(self) -> list[Weight]:
        """One weight of each shape that a product of this model has."""
        projections = (*self._layers[0].projections, self._head)
        return list({p.weight.shape: p.weight for p in projections}.values())


def _rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, [max_model_len, 1, head_dim]; see `ops.rotary`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents  # [head_dim / 2]
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        wavelengths = 2 * math.pi / frequencies
        low = scaling.original_max_len / scaling.low_freq_factor
        high = scaling.original_max_len / scaling.high_freq_factor
        smooth = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
        stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
        middle = (wavelengths <= low) & (wavelengths >= high)
        frequencies = torch.where(middle, between, stretched)
    angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
