"""The tokenizer inside a GGUF as the usual Hugging Face files, chat template included.

Needs the tokenizers package. Written out by hand instead of converted by a library, because the
rule that cuts a text into words is only a name in the GGUF ("smollm", "qwen2") and is easily lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import FetchFailed
from outrider.models.gguf_weights import field, optional_field

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

CONTROL_TOKEN, USER_TOKEN, UNUSED_TOKEN = 3, 4, 5
"""llama.cpp's token types: with a meaning instead of a text, added texts, padding of the table."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
}
BYTE_LEVEL_RULES = ("gpt-2", "smollm", *WORD_PATTERNS)


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken

    kind = field(reader, "tokenizer.ggml.model")
    rule = optional_field(reader, "tokenizer.ggml.pre", "default")
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    types: list[int] = field(reader, "tokenizer.ggml.token_type")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED_TOKEN}
    if kind == "gpt2" and rule in BYTE_LEVEL_RULES:
        tokenizer = _byte_level(reader, vocab, rule)
        adds_bos = rule == "llama-bpe"
    elif kind == "llama":
        tokenizer = _sentence_piece(reader, vocab, tokens)
        adds_bos = True
    else:
        raise FetchFailed(
            f"no rule for a GGUF tokenizer of kind {kind!r} with rule {rule!r}; there are: "
            f"llama, and gpt2 with {', '.join(BYTE_LEVEL_RULES)}"
        )
    special_ids = [i for i, each in enumerate(types) if each == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in special_ids]
    )
    tokenizer.add_tokens(
        [AddedToken(tokens[i], normalized=False) for i, each in enumerate(types)
         if each == USER_TOKEN]
    )  # fmt: skip
    adds_bos = bool(optional_field(reader, "tokenizer.ggml.add_bos_token", adds_bos))
    if adds_bos:
        _add_bos(tokenizer, tokens, int(field(reader, "tokenizer.ggml.bos_token_id")))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(reader, tokens, special_ids, adds_bos=adds_bos)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_level(reader: GGUFReader, vocab: dict[str, int], rule: str) -> Tokenizer:
    """BPE over bytes, the kind that GPT-2 began."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    # Llama 3 takes a word that is a token as it is, without looking for its merges.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe")
    tokenizer = Tokenizer(model)
    if rule in WORD_PATTERNS:
        steps = [
            pre_tokenizers.Split(Regex(WORD_PATTERNS[rule]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if rule == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(reader: GGUFReader, vocab: dict[str, int], tokens: list[str]) -> Tokenizer:
    """BPE over characters with a byte token for each byte that no token spells: Llama 2's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = tokens[int(optional_field(reader, "tokenizer.ggml.unknown_token_id", 0))]
    model = models.BPE(
        vocab=vocab,
        merges=merges_of(vocab, field(reader, "tokenizer.ggml.scores")),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if optional_field(reader, "tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_of(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a list of scored tokens stands for: every way to join two tokens into a
    third, the best third first.
    """
    merges = []
    for token, token_id in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(vocab[a], vocab[b], a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(-scores[token_id], a, b) for _, _, a, b in sorted(known)]
    return [(a, b) for _, a, b in sorted(merges, key=lambda merge: merge[0])]


def _add_bos(tokenizer: Tokenizer, tokens: list[str], bos_id: int) -> None:
    """Begin every plain text with the token for the beginning."""
    from tokenizers import processors

    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _config(
    reader: GGUFReader, tokens: list[str], special_ids: list[int], *, adds_bos: bool
) -> dict[str, Any]:
    architecture = field(reader, "general.architecture")
    config = {
        "add_bos_token": adds_bos,
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
        "chat_template": optional_field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(field(reader, f"{architecture}.context_length")),
        # The plain class: it takes tokenizer.json as it stands.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, role in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = optional_field(reader, f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[int(token_id)]
    return {key: value for key, value in config.items() if value is not None}
