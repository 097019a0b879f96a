"""Prompts to token ids and back, on threads: short texts never wait behind long ones.

Long ones wait in a line of their own, of bounded size, which who is cancelled leaves. A text that
cannot fit whatever its tokens are is refused before it costs anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gateway.lane import Lane
from gateway.requests import Prompt
from gateway.templates import TemplateRefused
from gateway.tokenizer import ModelTokenizer, TooLong
from outrider.serving.errors import InvalidRequest

_T = TypeVar("_T")

_SHORT_BYTES = 16 * 1024
"""Up to this size a text takes some ten milliseconds; a megabyte takes seconds."""
_LINE_PROMPTS = 16
"""How many of the largest prompts may wait for their turn; or as many bytes of smaller ones."""
_ID_BYTES = 4
"""What a token's text has, about."""


class Encoder:
    """The tokenizer of a gateway, as its event loop may use it."""

    def __init__(self, tokenizer: ModelTokenizer, max_prompt_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._short = Lane("tokenizer")
        self._long = Lane("tokenizer-long", _LINE_PROMPTS * max_prompt_bytes)

    async def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """The prompt's ids. Raises InvalidRequest, also for what cannot fit in `max_tokens`.

        Raises Overloaded when too much is waiting.
        """
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        with _refusing(prompt.field):
            if prompt.text is not None and max_tokens is not None:
                self._tokenizer.check_fits(prompt.text, max_tokens)
            return await self._run(prompt.num_bytes, lambda: self._encode(prompt, max_tokens))

    async def tokenize(self, prompt: Prompt) -> tuple[list[int], list[str]]:
        """The prompt's ids, however many, and each as the vocabulary spells it. As `encode`."""

        def call() -> tuple[list[int], list[str]]:
            ids = self._encode(prompt)
            return ids, [self._tokenizer.token(each) for each in ids]

        with _refusing(prompt.field):
            return await self._run(prompt.num_bytes, call)

    async def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """The text of ids."""
        return await self._run(
            _ID_BYTES * len(ids), lambda: self._tokenizer.decode(ids, keep_special=keep_special)
        )

    def close(self) -> None:
        """Let the threads go."""
        self._short.close()
        self._long.close()

    def _encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        if prompt.text is not None:
            return self._tokenizer.encode(prompt.text)
        assert prompt.messages is not None
        return self._tokenizer.encode_chat(prompt.messages, max_tokens)

    async def _run(self, num_bytes: int, call: Callable[[], _T]) -> _T:
        lane = self._short if num_bytes <= _SHORT_BYTES else self._long
        return await lane.run(num_bytes, call)


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    try:
        yield
    except (TemplateRefused, TooLong) as error:
        raise InvalidRequest(field, str(error)) from error
