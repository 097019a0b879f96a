"""The tokenizer inside a GGUF as the usual Hugging Face files, chat template included.

Needs the tokenizers package. Written out by hand instead of converted by a library, because the
rule that splits digits is only a name ("smollm") in the GGUF and is easily lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import FetchFailed
from outrider.models.gguf_weights import field

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL_TOKEN = 3  # llama.cpp's token type for tokens with a meaning instead of a text


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise FetchFailed(f"no rule for a tokenizer of kind {kind}")
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    types: list[int] = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_ids = [token_id for token_id, kind in enumerate(types) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(tokens[token_id], normalized=False, special=True) for token_id in special_ids]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(reader, tokens, special_ids)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(reader: GGUFReader, tokens: list[str], special_ids: list[int]) -> dict[str, Any]:
    def token_of(role: str) -> str:
        return tokens[int(field(reader, f"tokenizer.ggml.{role}_token_id"))]

    return {
        "add_bos_token": bool(field(reader, "tokenizer.ggml.add_bos_token")),
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token_id): {
                "content": tokens[token_id],
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token_id in special_ids
        },
        "bos_token": token_of("bos"),
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token_of("eos"),
        "model_max_length": int(field(reader, "llama.context_length")),
        "pad_token": token_of("padding"),
        # The plain class: it takes tokenizer.json as it stands.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token_of("unknown"),
    }
