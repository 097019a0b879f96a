"""The tokenizer, chat template and sizes of a local model folder. Never imports torch.

`tokenizers` and Jinja are used directly: that loads in a tenth of a second. Calls block for seconds
on the longest inputs, so `encoder.py` makes them on threads; other threads run meanwhile.

Strings that spell a special token, such as `<|im_end|>`, become that token wherever they stand, in
plain text and inside chat messages alike, as transformers does by default. Who must keep users from
writing control tokens filters messages before they come here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from gateway.detokenizer import (
    ByteLevelDetokenizer,
    ByteTable,
    Detokenizer,
    WindowedDetokenizer,
    is_byte_token,
)
from gateway.templates import ChatTemplate, TemplateRefused
from gateway.token_sizes import TokenSizes
from outrider.model_error import ModelError

_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_SENTENCE_PIECE_BLANK = "\u2581"


class TooLong(Exception):
    """A text has too many tokens, whichever those are. The message says how long it may be."""


class ModelTokenizer:
    """Text to ids and back, as one model's own files say."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        byte_level: bool,
        blank: str = " ",
        template: ChatTemplate | None,
        vocab_size: int,
        max_model_len: int,
        sizes: TokenSizes | None,
    ) -> None:
        """`load` makes one from a folder. sizes: None where nobody knows.

        `blank` is what the vocabulary has in place of one.
        """
        self.vocab_size = vocab_size
        """Ids that the model takes; may exceed the tokens that have a spelling."""
        self.max_model_len = max_model_len
        self._sizes = sizes
        self._raw = raw
        self._template = template
        self._blank = blank
        self._special = frozenset(
            token.content for token in raw.get_added_tokens_decoder().values() if token.special
        )
        self._byte_table = ByteTable(raw.id_to_token, self._special) if byte_level else None

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read config.json, tokenizer.json and the template. Raises ModelError."""
        config = _read_json(folder / "config.json")
        raw_json = _read_json(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json", missing_ok=True)
        raw = _read_tokenizer(folder / "tokenizer.json")
        raw.no_padding()
        raw.no_truncation()
        try:
            return cls(
                raw,
                byte_level=_is_byte_level(raw_json.get("decoder")),
                blank=_blank(raw_json.get("decoder")),
                template=_load_template(folder, settings),
                vocab_size=int(config["vocab_size"]),
                max_model_len=int(config["max_position_embeddings"]),
                sizes=TokenSizes.read(raw, raw_json),
            )
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'} lacks {error}") from error
        except TypeError as error:
            raise ModelError(f"{folder / 'config.json'}: {error}") from error
        except ValueError as error:
            raise ModelError(f"{folder}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the tokenizer itself puts around a plain text."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[tuple[str, str]], max_tokens: int | None = None
    ) -> list[int]:
        """Ids of (role, content) pairs through the template. Raises TemplateRefused.

        Raises TooLong for what cannot fit in `max_tokens`.
        """
        if self._template is None:
            raise TemplateRefused("this model has no chat template")
        text = self._template.render(messages)
        if max_tokens is not None:
            self.check_fits(text, max_tokens)
        return self._encode(text, add_special_tokens=False)

    def check_fits(self, text: str, max_tokens: int) -> None:
        """Quickly raise TooLong for many of the texts with more tokens than that."""
        if self._sizes is None:
            return
        num_bytes, limit = self._sizes.num_bytes(text), max_tokens * self._sizes.longest
        if num_bytes > limit:
            raise TooLong(
                f"at most {limit} bytes can fit in the context of {max_tokens}, got {num_bytes}"
            )

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of ids."""
        # The batch form lets other threads run.
        texts = self._raw.decode_batch([list(ids)], skip_special_tokens=not keep_special)
        return str(texts[0])

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for an id without one."""
        return self._raw.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for inside a text; of a special one its spelling.

        May be part of a character; empty for an id without a token.
        """
        token = self.token(token_id)
        if token in self._special:
            return token.encode()
        if self._byte_table is not None:
            return self._byte_table[token_id]
        if is_byte_token(token):
            return bytes([int(token[3:-1], 16)])
        return token.replace(self._blank, " ").encode()

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one stream of ids."""
        if self._byte_table is not None:
            return ByteLevelDetokenizer(self._byte_table)
        return WindowedDetokenizer(self._raw.decode, self._raw.id_to_token, self._special)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch form lets other threads run; `encode` holds the interpreter's lock throughout.
        encodings = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)


def _read_tokenizer(path: Path) -> RawTokenizer:
    try:
        return RawTokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower one
        raise ModelError(f"{path}: {error}") from error


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _blank(decoder: dict[str, Any] | None) -> str:
    """SentencePiece's mark for one if the decoder knows it, otherwise a blank."""
    return _SENTENCE_PIECE_BLANK if _SENTENCE_PIECE_BLANK in repr(decoder) else " "


def _load_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    if source is None:
        return None
    legacy = _read_json(folder / "special_tokens_map.json", missing_ok=True)
    special = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name, legacy.get(name))
        if value is not None:
            special[name] = str(value["content"] if isinstance(value, dict) else value)
    return ChatTemplate(source, special)


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ModelError(f"{path} is missing") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold an object")
    return value
