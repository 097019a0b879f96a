"""How much of a text one token can stand for, where a tokenizer's own file tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gateway.detokenizer import byte_of_char


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Of a byte-level vocabulary behind which a text is as long as before."""

    longest: int
    """Bytes of the longest token."""
    dropped: bytes
    """Those that no token spells: they are left out of a text."""

    @classmethod
    def read(cls, raw: Tokenizer, raw_json: dict[str, Any]) -> TokenSizes | None:
        """From a tokenizer and its file; None where a text may shrink in other ways."""
        added = raw.get_added_tokens_decoder().values()
        if (
            raw_json.get("normalizer") is not None
            or not _keeps_bytes(raw_json.get("pre_tokenizer"))
            or any(token.lstrip or token.rstrip for token in added)  # takes any number of blanks
        ):
            return None
        vocab = raw.get_vocab()
        # A byte is one character of a token's spelling, but what was added reads as it is spelled.
        longest_added = max((len(token.content.encode()) for token in added), default=0)
        return cls(
            longest=max(longest_added, *map(len, vocab)),
            dropped=bytes(byte for char, byte in byte_of_char().items() if char not in vocab),
        )

    def num_bytes(self, text: str) -> int:
        """The bytes that become part of tokens."""
        return len(text.encode().translate(None, self.dropped))


def _keeps_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """It turns every byte of a text into a character, and leaves none out."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = {part["type"] for part in parts}
    dropping = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Digits", "Split"} and not dropping
