"""Tiny random model folders made on the fly: every file a real one has, in well under a second.

The tokenizer is a byte-level BPE, so any text goes through it; the weights are random and mean
nothing. The same arguments always give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.kernels import are_interpreted, fitting_head_dim

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. One river runs to the sea, and the sea is not "
    "full. There was a house on a hill with a red door, and behind the door there was a room."
)


def make_tiny_model(
    folder: Path,
    *,
    arch: str = "llama",
    vocab_size: int = 384,
    layers: int = 2,
    hidden_size: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_len: int = 512,
    tied_head: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a model folder with tokenizer and return it; `config` overrides its config's fields."""
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[arch]
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": tied_head,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        **config,
    }
    if are_interpreted():
        fields["head_dim"] = fitting_head_dim(config.get("head_dim", hidden_size // heads))
    model = model_class(config_class(**fields))
    _randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size)
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE with a few merges and a chat template; at most vocab_size ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _randomise(model: Any, generator: Any) -> None:
    """Weights large enough that attention and biases matter to the logits."""
    import torch

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
