"""The bounded hand-over of tokens from the batcher to the call that delivers them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from target_service.request import Piece


class TokenStream:
    """One writer, one reader. Never blocks the writer: it is `full` and the request then pauses."""

    def __init__(self, max_tokens: int, on_drained: Callable[[], None]) -> None:
        self.full = False
        self._max_tokens = max_tokens
        self._on_drained = on_drained
        self._pieces: deque[Piece] = deque()
        self._num_tokens = 0
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Add the tokens of a round."""
        self._pieces.append(piece)
        self._num_tokens += len(piece.tokens) + len(piece.prompt)
        self.full = self.full or self._num_tokens >= self._max_tokens
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End with an error, behind the tokens that are already here."""
        self._error = error
        self._ready.set()

    async def get(self) -> Piece:
        """The next piece, in order; raises the error that ended the stream behind the last one."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        piece = self._pieces.popleft()
        self._num_tokens -= len(piece.tokens) + len(piece.prompt)
        # It goes on when it is half empty, so that a slow reader does not stop it at every token.
        if self.full and self._num_tokens <= self._max_tokens // 2:
            self.full = False
            self._on_drained()
        return piece
