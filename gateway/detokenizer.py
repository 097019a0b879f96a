"""Token ids to text, one token at a time, byte for byte as one decode of all ids would give it.

What is handed out is never taken back and never holds half a character: bytes wait until their
character is whole, and `flush` turns what is left into U+FFFD, as the full decode does. Special
tokens give no text. Ids that no token has (padding of the embedding) give none either.

The full decode is that of the generated ids alone. Byte-level tokenizers do not mind; those that
drop the space before the first word drop it here too.

    ByteLevelDetokenizer   byte-level BPE: a table from token to bytes and a UTF-8 decoder
    WindowedDetokenizer    everything else: decodes a short window again and hands out what is new
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one stream of ids."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; may be empty."""

    def flush(self) -> str:
        """What was still waiting. Call once, after the last token."""


def is_byte_token(token: str) -> bool:
    """It stands for one byte and is spelled so, as in <0x0A>."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def byte_of_char() -> dict[str, int]:
    """The GPT-2 table: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class ByteTable:
    """The bytes of each token of a byte-level vocabulary, looked up once and remembered."""

    def __init__(self, token_of: Callable[[int], str | None], special: frozenset[str]) -> None:
        """`token_of(id)` spells a token, None for an unused id; `special` tokens give no bytes."""
        self._token_of = token_of
        self._special = special
        self._byte_of_char = byte_of_char()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token in self._special:
            return b""
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:  # an added token, spelled as it reads
            return token.encode()


class ByteLevelDetokenizer:
    """For byte-level BPE: exact and O(1) a token."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        """U+FFFD for an unfinished character, if any."""
        return self._decoder.decode(b"", final=True)


class WindowedDetokenizer:
    """For any other tokenizer: hands out the growth of a short window's decode.

    Text waits while the window ends in a byte token (the decode of a whole run of them changes with
    its last byte) or in U+FFFD (perhaps the beginning of a character).
    """

    KEEP = 8
    """Tokens of context that stay in the window; joining rules look back one or two."""
    LONG = 32
    """Window length that starts a cut."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        token_of: Callable[[int], str | None],
        special: frozenset[str],
    ) -> None:
        """`decode` leaves out `special` tokens."""
        self._decode = decode
        self._token_of = token_of
        self._special = special
        self._in_bytes = False  # a run of byte tokens is open
        self._window: list[int] = []
        self._cut_above = self.LONG
        self._num_looked_at = 1  # the window's first tokens: it cannot be cut before one of them
        self._given = ""  # the window's text that was handed out

    def push(self, token_id: int) -> str:
        """The window's new text, or nothing while it could still change."""
        token = self._token_of(token_id)
        if token is None or token in self._special:
            return ""  # silent: the decoder leaves it out before it looks at neighbours
        self._window.append(token_id)
        self._in_bytes = is_byte_token(token)
        if self._in_bytes:
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        """All that is left."""
        return self._hand_out(self._decode(self._window))

    def _hand_out(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""  # the decoder rewrote the past: wait rather than take something back
        new = text[len(self._given) :]
        self._given = text
        if len(self._window) > self._cut_above:
            self._cut()
        return new

    def _cut(self) -> None:
        """Forget old tokens. The rest must begin with text, or the decoder sees a new beginning.

        Looks at each token of the window at most once, however long no cut is possible.
        """
        last = len(self._window) - self.KEEP
        for start in range(last, self._num_looked_at - 1, -1):
            if self._is_text(start) and self._decode([self._window[start]]).strip():
                self._cut_at(start)
                return
        # A run of blanks. What decoders drop at a beginning is dropped if anything is left of it.
        if self._is_text(last) and self._decode(self._window[last:]):
            self._cut_at(last)
            return
        self._num_looked_at = last + 1
        self._cut_above = len(self._window) + self.LONG

    def _is_text(self, index: int) -> bool:
        """A byte token is none: the bytes before it may belong to its character."""
        return not is_byte_token(self._token_of(self._window[index]) or "")

    def _cut_at(self, start: int) -> None:
        self._window = self._window[start:]
        self._given = self._decode(self._window)
        self._cut_above = self.LONG
        self._num_looked_at = 1
