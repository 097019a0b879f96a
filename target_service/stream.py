"""The bounded hand-over of tokens from the batcher to the call that delivers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from outrider.serving.errors import Unavailable
from target_service.request import Reason, Token


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that were made since the last piece, and the end if it has come."""

    tokens: list[Token]
    reason: Reason | None


class TokenStream:
    """One writer, one reader. Never blocks the writer: it is `full` and the request then pauses.

    A reader that takes nothing for `stall_s` while the stream is full loses it.
    """

    def __init__(
        self,
        max_tokens: int,
        stall_s: float,
        on_drained: Callable[[], None],
        on_stall: Callable[[], None],
    ) -> None:
        self.full = False
        self._max_tokens = max_tokens
        self._stall_s = stall_s
        self._on_drained, self._on_stall = on_drained, on_stall
        self._tokens: list[Token] = []
        self._reason: Reason | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._stall_timer: asyncio.TimerHandle | None = None

    def put(self, tokens: list[Token], reason: Reason | None) -> None:
        """Add tokens and, with the last ones, the end."""
        self._tokens.extend(tokens)
        self._reason = reason
        self._ready.set()
        if len(self._tokens) >= self._max_tokens and not self.full:
            self.full = True
            loop = asyncio.get_running_loop()
            self._stall_timer = loop.call_later(self._stall_s, self._stall)

    def fail(self, error: Exception) -> None:
        """End with an error, behind the tokens that are already here."""
        self._error = error
        self._ready.set()

    async def get(self) -> Piece:
        """Everything new, waiting for something; raises the error that ended the stream."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None and not self._tokens:
            raise self._error
        if self._error is not None:
            self._ready.set()
        tokens, self._tokens = self._tokens, []
        if self.full:
            self.full = False
            self.close()
            self._on_drained()
        return Piece(tokens, self._reason)

    def close(self) -> None:
        """Stop watching for a stalled reader."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stall(self) -> None:
        self._tokens.clear()
        self.fail(Unavailable(f"the stream was not read for {self._stall_s:g} s"))
        self._on_stall()
